"""For all tests: an example of a property may take as long as it takes, on a busy machine too.

The examples are the same in every run: who changes something sees what the change did. Others are for whoever looks for
them: `pytest --hypothesis-profile=explore`.
"""

from hypothesis import settings

settings.register_profile("explore", deadline=None)
settings.register_profile("elaswave", deadline=None, derandomize=True)
settings.load_profile("elaswave")
