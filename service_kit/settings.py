"""Settings of a service: defaults → TOML file → environment → flags, checked by one pydantic model.

cyclopts reads flags, finds what is misspelt and writes the help; pydantic converts and checks.
Where each value is from is part of every complaint and of the configuration logged at start.
Nothing is ever ignored: a key that no field has, from any layer, ends the start.
"""

import inspect
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from cyclopts import (
    App,
    ArgumentCollection,
    CoercionError,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    Token,
    UnknownOptionError,
)
from cyclopts.config import Dict
from pydantic import (
    BaseModel,
    ConfigDict,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from service_kit.errors import ConfigError


class Settings(BaseModel):
    """Base of every service's settings: frozen, strict about keys, remembers origins."""

    # "inf" and "nan" are floats to Python, and a wait of either is none.
    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _split(cls, values: Any) -> Any:
        """Text for a field of many values is comma-separated."""
        return {
            name: [part for text in value for part in map(str.strip, text.split(",")) if part]
            if isinstance(value, list)
            else value
            for name, value in values.items()
        }

    @field_validator("*")
    @classmethod
    def _written_out(cls, value: Any) -> Any:
        """A shell puts a home in place of `~` after a space; not after `=`, and in no file."""
        return at_home(value) if isinstance(value, Path) else value


SettingsT = TypeVar("SettingsT", bound=Settings)
ConfigFile = Annotated[Path | None, Parameter(help="TOML file of these, with _ in place of -")]


def at_home(path: Path) -> Path:
    """With a home in place of `~`. ValueError: there is none."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError("nobody here has this home folder; write it out") from None


def grouped(name: str) -> Callable[[type[SettingsT]], type[SettingsT]]:
    """The fields of this class, not those it inherits, stand together in `--help`."""

    def mark(model: type[SettingsT]) -> type[SettingsT]:
        for field in model.__annotations__.keys() & model.model_fields.keys():
            model.model_fields[field].metadata.append(Parameter(group=Group(name, sort_key=1)))
        return model

    return mark


def load(
    model: type[SettingsT],
    service: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> SettingsT:
    """Merge the layers and validate. ConfigError says what is wrong and where; `--help` exits."""
    prefix = f"KAITEN_{service.upper()}_"
    given: dict[str, Sequence[Token]] = {}

    def layers(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """What the flags leave out. An earlier layer goes before a later one."""
        of_fields = (each for each in arguments if each.keys)
        fields = ArgumentCollection(of_fields)  # type: ignore[no-untyped-call]
        for key, value in (os.environ if environ is None else environ).items():
            if key.startswith(prefix):
                # As a key of the file, which knows small letters only.
                table = {key.removeprefix(prefix).swapcase(): value}
                Dict(table, source=f"env {key}")(app, commands, fields)
        for token in next(each.tokens for each in arguments if each.name == "--config"):
            Dict(_table(token.value), source=f"file {token.value}")(app, commands, fields)
        given.update({each.keys[0]: each.tokens for each in fields if each.tokens})

    try:
        settings = _app(model, service, layers)(argv, print_error=False, exit_on_error=False)
    except CycloptsError as error:
        raise ConfigError(_complaint(model, error, given)) from None
    if not isinstance(settings, model):
        raise SystemExit(0)
    settings._origins.update({name: _origin(tokens[0]) for name, tokens in given.items()})
    return settings


def describe(settings: Settings) -> dict[str, object]:
    """Every field with its value and origin, for one log line. Secrets are redacted."""
    described: dict[str, object] = {}
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        shown = value if isinstance(value, bool | int | float | None) else str(value)
        described[name] = {"value": shown, "origin": settings._origins.get(name, "default")}
    return described


def _app(model: type[Settings], service: str, layers: Any) -> App:
    """Called with flags it returns the settings, or None after it has printed its help."""
    app = App(
        name=f"kaiten {service}",
        help=f"{model.__doc__}\n\nA flag is also `KAITEN_{service.upper()}_…` in the environment.",
        version_flags=(),
        config=layers,
        default_parameter=Parameter(
            negative_iterable=(), allow_repeating=False, show_default=_shown_default
        ),
        result_action="return_value",
    )
    app["--help"].show = False
    is_needed = any(field.is_required() for field in model.model_fields.values())
    default: Any = inspect.Parameter.empty if is_needed else None

    @app.default
    def take(
        *,
        settings: Annotated[model, Parameter(name="*")] = default,  # type: ignore[valid-type]
        config: ConfigFile = None,
    ) -> Settings:
        return settings or model()  # type: ignore[unreachable]

    return app


def _table(path: str) -> dict[str, Any]:
    try:
        table = tomllib.loads(Path(os.path.expanduser(path)).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not TOML: {error}") from error
    # cyclopts would pass over a key that is named as a command is.
    if dashed := [key for key in table if key.startswith("-")]:
        raise ConfigError(f"--config {path}: unknown key {dashed[0]!r}; keys have no dashes before")
    return table


def _origin(token: Token) -> str:
    return f"flag {token.keyword}" if token.source == "cli" else token.source


def _complaint(
    model: type[BaseModel], error: CycloptsError, given: Mapping[str, Sequence[Token]]
) -> str:
    """The first problem as one sentence: where, what was written, the rule, the field."""
    if isinstance(error, CoercionError | UnknownOptionError) and error.token is not None:
        # What stands behind a misspelt flag may be a secret too.
        named = error.argument and model.model_fields[error.argument.keys[0]]
        written = "…" if named and _is_secret(named) else error.token.value.partition("=")[0]
        error.token = error.token.evolve(value=written)
    if isinstance(error, MissingArgumentError):
        missing = error.argument
        if error.keyword or missing is None:
            return str(error)
        return f"{missing.name} must be given: {model.model_fields[missing.keys[0]].description}"
    if not isinstance(error.__cause__, ValidationError):
        return str(error)
    first = error.__cause__.errors(include_url=False, include_context=False)[0]
    rule = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    rule = rule[:1].lower() + rule[1:]
    name = str(first["loc"][0]) if first["loc"] else ""
    if name not in given:
        return rule
    field = model.model_fields[name]
    about = f" ({name}: {field.description})" if field.description else ""
    shown = "…" if _is_secret(field) else repr(",".join(token.value for token in given[name]))
    return f"{_origin(given[name][0])} = {shown}: {rule}{about}"


def _is_secret(field: FieldInfo) -> bool:
    return field.annotation is SecretStr or SecretStr in get_args(field.annotation)


def _shown_default(value: object) -> str | None:
    if isinstance(value, SecretStr):
        value = value.get_secret_value()  # what stands in the code is no secret
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return None if value is None or value == "" else str(value)
