"""The plots of a report. Each module draws one idea into axes that it is given."""
