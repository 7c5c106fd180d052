"""The report of a run, for people: the page of `report`, which `watch` serves while the run goes on."""
