"""Training objectives and advantages as data: the axes, the published presets, and the loss that is built from them."""
