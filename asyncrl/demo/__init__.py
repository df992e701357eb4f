"""The demo model: a tiny model that asyncrl builds itself, for the quickstart and the tests (`model.tiny`)."""
