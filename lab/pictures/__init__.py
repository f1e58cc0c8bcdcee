"""The pictures of ``docs``, drawn from what they show: ``make pictures`` writes the files, and a test compares them."""
