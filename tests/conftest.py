"""For all tests: an example of a property may take as long as it takes, on a busy machine too."""

from hypothesis import settings

settings.register_profile("elaswave", deadline=None)
settings.load_profile("elaswave")
