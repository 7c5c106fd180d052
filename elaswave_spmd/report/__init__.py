"""What a run looked like, for people: the page of `report`, which `watch` serves while the run goes on."""
