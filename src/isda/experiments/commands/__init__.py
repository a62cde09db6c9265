"""The commands of ``isda``: ``isda train`` is the function ``run`` of ``train.py``, and so on.

``arguments.py`` and ``recipe_arguments.py`` read their words, ``task.py`` is what they train.
"""
