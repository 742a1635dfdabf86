"""What cannot run together, as a table of rules over facts.

`check` is the way in: it runs every rule and names all that is broken. `facts` says what a rule
may know; the rules stand in the other files.
"""
