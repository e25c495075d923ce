"""``specdecode-operator simulate``: the operator's own decide() against modelled workers, beside baselines and oracles.

``world`` runs ``worker``s on a ``trace``; ``policies`` choose depths and replicas; ``score`` says what it cost.
"""
