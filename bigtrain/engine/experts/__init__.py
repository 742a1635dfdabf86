"""What training does for a mixture of experts beside dividing it.

`load` counts which experts tokens choose and what ranks send each other; `router_losses` is what
routers add to a loss; `selection_bias` balances without one.
"""
