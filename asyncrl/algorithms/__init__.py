"""Objectives and advantages as data: presets, their axes, the loss that is made of them."""
