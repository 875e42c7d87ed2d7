"""Why changes of the automatic sweep are not caught: {pattern of "module:function: old -> new": reason}.

A reason that begins with "equivalent" says why no number can differ; such changes are not counted.
"""

SURVIVORS: dict[str, str] = {}
