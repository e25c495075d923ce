"""Credentials of a worker: API keys and admin tokens from flags, environment and files."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from specdecode_worker.contract import Env, ServerConfig
from specdecode_worker.server.access.generated_token import generate_token, token_file
from specdecode_worker.server.access.reloaded_secrets import ReloadedSecrets, watching
from specdecode_worker.server.access.scopes import Scope
from specdecode_worker.server.access.secret_files import SecretFileError, read_fingerprint, read_secrets
from specdecode_worker.server.errors import CannotStart

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Credentials:
    """API keys and admin tokens of a worker.

    ``generated_token`` is the admin token that was made because none was given; empty otherwise.
    """

    api_keys: ReloadedSecrets | None
    """None admits every client to the public port."""
    admin_tokens: ReloadedSecrets
    generated_token: str = ""

    @contextlib.contextmanager
    def in_use(self, admin_port: int, environ: Mapping[str, str]) -> Iterator[None]:
        """Read changed files again, and keep a generated token in its file, while the block runs.

        Raises:
            CannotStart: The file of a generated token cannot be written.
        """
        sources = [self.admin_tokens, *([self.api_keys] if self.api_keys else [])]
        with contextlib.ExitStack() as stack:
            if self.generated_token:
                file = stack.enter_context(token_file(self.generated_token, admin_port, environ))
                log.info("admin token: made for this run; it is in %s", file)
            stack.enter_context(watching(sources))
            yield


def load_credentials(config: ServerConfig, environ: Mapping[str, str], flag_keys: Sequence[str] = ()) -> Credentials:
    """Read all credentials for the first time.

    Args:
        config: Has the paths of keys and tokens.
        environ: Environment variables of the process.
        flag_keys: Keys of the flag --api-key.

    Raises:
        CannotStart: A source of keys or tokens is given and holds none, or cannot be read.
    """
    try:
        api_keys = _api_keys(config, _fixed_keys(environ, flag_keys))
        tokens, generated = _fixed_tokens(environ, generate=config.admin_tokens_path is None)
        return Credentials(api_keys, _admin_tokens(config, tokens), generated)
    except SecretFileError as error:
        raise CannotStart(str(error)) from None


def _fixed_keys(environ: Mapping[str, str], flag_keys: Sequence[str]) -> dict[str, str]:
    """Return the keys of environment and flag, named key-1, key-2 and so on."""
    words = environ.get(Env.api_keys, "").split()
    if Env.api_keys in environ and not words:
        raise CannotStart(f"${Env.api_keys} is set and holds no key; set a key, or unset it to serve every client")
    if not all(key.strip() for key in flag_keys):
        raise CannotStart("--api-key holds no key; give a key, or leave the flag out to serve every client")
    return {f"key-{number}": key.strip() for number, key in enumerate((*words, *flag_keys), 1)}


def _api_keys(config: ServerConfig, fixed: Mapping[str, str]) -> ReloadedSecrets | None:
    if config.api_keys_path is None:
        return ReloadedSecrets("API keys", fixed) if fixed else None
    path = Path(config.api_keys_path)

    def read() -> dict[str, str]:
        keys = read_secrets(path, first_number=len(fixed) + 1, many=True)
        if taken := sorted(keys.keys() & fixed.keys()):
            raise SecretFileError(f"{path}: the name {taken[0]} is that of a key of the command line or environment")
        return keys

    return ReloadedSecrets("API keys", fixed, read, partial(read_fingerprint, path))


def _fixed_tokens(environ: Mapping[str, str], *, generate: bool) -> tuple[dict[str, str], str]:
    """Return the tokens of the environment by scope, and the one that was generated because there is none."""
    given = environ.get(Env.admin_token)
    if given is not None:
        if not given.strip():
            raise CannotStart(f"${Env.admin_token} is set and holds no token; set one, or unset it to have one made")
        return {Scope.operator: given.strip()}, ""
    generated = generate_token() if generate else ""
    return ({Scope.operator: generated} if generated else {}), generated


def _admin_tokens(config: ServerConfig, fixed: Mapping[str, str]) -> ReloadedSecrets:
    """Return the admin tokens by scope: those of the folder and that of the environment."""
    named = {f"{scope}/environment": token for scope, token in fixed.items()}
    if config.admin_tokens_path is None:
        return ReloadedSecrets("admin tokens", named)
    path = Path(config.admin_tokens_path)

    def read() -> dict[str, str]:
        if not path.is_dir():
            raise SecretFileError(f"{path} is no folder; it must be one, with files named {', '.join(Scope)}")
        tokens = read_secrets(path, many=True)
        known = {name: token for name, token in tokens.items() if name.partition("/")[0] in set(Scope)}
        if unknown := sorted(tokens.keys() - known.keys()):
            log.warning("%s: %s is ignored; a token is in a file named %s", path, unknown[0], ", ".join(Scope))
        if not known:
            raise SecretFileError(f"{path} holds no token; it needs a file named {', '.join(Scope)}")
        return known

    return ReloadedSecrets("admin tokens", named, read, partial(read_fingerprint, path))
