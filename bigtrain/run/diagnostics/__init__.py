"""What is looked for at each step: bad updates, slow ranks, lack of memory, profiles."""
