"""Settings that a learner inherits: they belong to its signature and its docstring too."""

from __future__ import annotations

import inspect
import textwrap
from inspect import Parameter

from hts_torchrl.training.run_settings import taking


def show_inherited(cls: type, *, besides: tuple[str, ...] = ()) -> None:
    """Give a class whose ``**settings`` go to its base class the signature and the Args of both.

    So ``help()`` and Sphinx show what the command line shows.

    Args:
        cls: is changed in place.
        besides: settings of the base class that it does not have.
    """
    shown: dict[str, Parameter] = {}
    texts: dict[str, str] = {}
    for each in taking(cls):
        _, *parameters = inspect.signature(each.__init__).parameters.values()  # type: ignore[misc]
        texts = _argument_texts(each) | texts
        shown = {p.name: p for p in parameters if p.kind != Parameter.VAR_KEYWORD} | shown
    shown = {name: parameter for name, parameter in shown.items() if name not in besides}
    cls.__signature__ = inspect.Signature(sorted(shown.values(), key=_place))  # type: ignore[attr-defined]
    if cls.__doc__:
        head, _, after = inspect.cleandoc(cls.__doc__).partition("\n\nArgs:\n")
        entries = [f"    {name}: {texts[name]}" for name in shown if name in texts]
        _, *sections = after.partition("\n\n")
        cls.__doc__ = "\n".join([head, "", "Args:", *entries]) + "".join(sections)


def _place(parameter: Parameter) -> tuple[int, bool]:
    """Return by what parameters are ordered: those without a default come first."""
    kind = parameter.kind
    return kind, kind != Parameter.KEYWORD_ONLY and parameter.default is not Parameter.empty


def _argument_texts(cls: type) -> dict[str, str]:
    """Return what a class's docstring says of each argument, however far its lines are indented."""
    after = inspect.cleandoc(cls.__doc__ or "").partition("\n\nArgs:\n")[2]
    texts, name = {"": ""}, ""
    for line in textwrap.dedent(after.partition("\n\n")[0]).splitlines():
        if line.startswith(" "):
            texts[name] += f"\n    {line}"
        else:
            name, _, text = line.partition(": ")
            texts[name] = text
    return texts
