"""The report of a run for people: the page that `report` makes, and that `watch` serves while the run goes on."""
