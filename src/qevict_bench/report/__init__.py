"""Tables, figures and one page of all that runs have measured: what scripts/report.py writes."""
