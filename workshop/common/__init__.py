"""What all lessons share: models and data (the recipes' own, by link), command lines, records, checks of exercises."""
