"""Results for people: terminal tables now, plots and pages later. Nothing here prints."""
