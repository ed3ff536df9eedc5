"""From the files of a user to tokens and labels: one reader and one set of formats, for the command line and
for training."""
