"""Data, models and simulators that claims run on: shared loaders, embedded defaults, files of the user."""
