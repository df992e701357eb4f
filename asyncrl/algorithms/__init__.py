"""Training objectives and advantages as data: the choices that make up an objective (the axes), the published presets,
and the loss that is built from them."""
