"""Images of rows for every training backend: the families of vision-language models, and the columns that a pass over
rows with images takes."""
