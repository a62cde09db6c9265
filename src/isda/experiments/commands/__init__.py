"""The commands of ``isda``: ``isda train`` is the function ``run`` of ``train.py``, and so on.

``gan``, ``invert`` and ``neighbours`` are functions of ``generators.py``. ``arguments.py`` and
``recipe_arguments.py`` parse the arguments of a command, ``task.py`` is what it trains.
``lambda_search.py`` chooses λ₀ for ``search`` and ``compare``. ``queue_lines.py``,
``queue_forecast.py`` and ``queue_workers.py`` are parts of ``queue``.
"""
