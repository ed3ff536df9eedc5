"""What the rows are: data sets, columns, collators."""
