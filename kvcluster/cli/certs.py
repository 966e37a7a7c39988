"""`kvcluster certs`: a small CA for trials, for TLS between workers, coordinator and shards.

What a certificate is stands in certificates.py; here are its files. They have the names that TLS Secrets of Kubernetes
and cert-manager use, so that servers read the same folder whoever made it.

A renewal leaves no moment in which a file is not whole. Both new files are on disk before the first is renamed; the key
is renamed first, then the certificate. Between the two renames the pair does not match: a server keeps the pair that it
has and looks again. If the machine fails just then, the certificate still lies there under its temporary name, and the
next renewal begins by putting it in its place.
"""

from __future__ import annotations

import argparse
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcluster.cli.command_parser import positive
from kvcluster.cli.text_page import TextPage, Tone, counted, print_figures
from kvcluster.core import limits
from kvcluster.errors import ConfigError
from kvcluster.extras import needs
from kvcluster.runtime.private_files import locked
from kvcluster.transport.certificates import COORDINATOR, EVENTS, OPERATOR, SHARD

if TYPE_CHECKING:
    from kvcluster.cli.certificates import CertAuthority, CertPair

_ROLES = (COORDINATOR, SHARD, OPERATOR, EVENTS, "tenant")
_CA, _CA_KEY, _CERTIFICATE, _KEY = "ca.crt", "ca.key", "tls.crt", "tls.key"
_NEW = ".new"
_SECRET, _PUBLIC = 0o600, 0o644
_OTHERS = stat.S_IRWXG | stat.S_IRWXO

_DESCRIPTION = """
Makes the certificates by which the processes of a cluster know one another in TLS, with a small CA of its own. It is
for trials and for clusters of a few hosts: the CA is a folder with a key that is not encrypted. In Kubernetes let
cert-manager make them.
"""

_INIT = """
Makes a new folder, which only you can enter, with the certificate and the private key of a new CA. Who has ca.key can
act as any process, operator and tenant of the cluster: keep the folder on one machine that serves nothing, and give
away ca.crt alone.
"""

_ISSUE = """
Makes a certificate for one process, or for the processes of one host, with a new private key: tls.crt, tls.key and
ca.crt, in the folder that --to names. Copy that folder to the host over an encrypted connection, such as scp. The
certificate says what its bearer may do (--role) and by which names others reach it (--name).
"""

_RENEW = """
Replaces the certificate and the key in a folder that `kvcluster certs issue` wrote with new ones, for the same roles
and names. A process that reads the folder meanwhile finds whole files, old or new; where the key is not that of the
certificate, it must look again. The command asks nothing, so that cron can run it.
"""

_SHOW = """
Shows what a certificate says: roles, names, issuer, when it ends, its fingerprint as a list of revoked certificates has
it, and whether the ca.crt in the same folder verifies it. It changes nothing.

exit status: 0; 1 if the certificate is not valid now, or ca.crt does not verify it.
"""


def add(commands: Any) -> None:
    """Adds the commands."""
    certs = commands.add_parser(
        "certs",
        help="make and show certificates for TLS",
        description=_DESCRIPTION,
        listed={"commands": ("init", "issue", "renew", "show")},
        examples=["kvcluster certs init ca", "kvcluster certs show ca"],
    )
    below = certs.add_subparsers(dest="kind", metavar="COMMAND")
    _add_init(below)
    _add_issue(below)
    _add_renew(below)
    _add_show(below)


def _add_init(below: Any) -> None:
    init = below.add_parser(
        "init",
        help="make a CA",
        description=_INIT,
        examples=["kvcluster certs init ca", "kvcluster certs init ca --cluster prod"],
    )
    init.add_argument("folder", metavar="FOLDER", help="new folder for ca.crt and ca.key")
    init.add_argument(
        "--cluster",
        default="kvcluster",
        metavar="NAME",
        help="name of the cluster, as in its configuration (default kvcluster)",
    )
    _add_days(init, 3_650, "the CA")
    init.set_defaults(run=_init)


def _add_issue(below: Any) -> None:
    issue = below.add_parser(
        "issue",
        help="make a certificate and its key",
        description=_ISSUE,
        examples=[
            "kvcluster certs issue ca --role coordinator --name 10.0.0.5 --to head",
            "kvcluster certs issue ca --role shard --name node-1.example --to node-1",
            "kvcluster certs issue ca --role tenant --tenant team-a --to team-a",
        ],
    )
    issue.add_argument("folder", metavar="FOLDER", help="folder of the CA, which `kvcluster certs init` made")
    issue.add_argument(
        "--role",
        required=True,
        action="append",
        choices=_ROLES,
        metavar="ROLE",
        help="what the bearer is: coordinator, shard, operator, events (a reader of KV events) or tenant; may be given "
        "several times",
    )
    issue.add_argument(
        "--to", required=True, metavar="FOLDER", help="folder for tls.crt, tls.key and ca.crt, made if it is missing"
    )
    issue.add_argument(
        "--tenant", metavar="NAME", help="with --role tenant, whose blocks the bearer shares (default: none)"
    )
    issue.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="NAME",
        help="DNS name, such as node-1.example or *.shards.example, or IP address by which others reach the bearer; "
        "may be given several times; a coordinator or shard needs one (default: none)",
    )
    _add_days(issue, 90, "the certificate")
    issue.set_defaults(run=_issue)


def _add_renew(below: Any) -> None:
    renew = below.add_parser(
        "renew",
        help="replace a certificate and its key by new ones",
        description=_RENEW,
        examples=["kvcluster certs renew node-1 --ca ca"],
    )
    renew.add_argument("folder", metavar="FOLDER", help="folder with tls.crt and tls.key")
    renew.add_argument("--ca", required=True, metavar="FOLDER", help="folder of the CA that issued the certificate")
    _add_days(renew, 90, "the certificate")
    renew.set_defaults(run=_renew)


def _add_show(below: Any) -> None:
    show = below.add_parser(
        "show",
        help="show what a certificate says",
        description=_SHOW,
        examples=["kvcluster certs show node-1", "kvcluster certs show node-1/tls.crt --json"],
    )
    show.add_argument(
        "path", metavar="PATH", help="file with a certificate in PEM, or a folder with tls.crt or else ca.crt"
    )
    show.add_argument("--json", action="store_true", help="print it as one JSON object")
    show.set_defaults(run=_show)


def _add_days(parser: argparse.ArgumentParser, days: int, what: str) -> None:
    parser.add_argument(
        "--days", type=positive, default=days, metavar="N", help=f"days until {what} ends (default {days})"
    )


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _init(options: argparse.Namespace) -> int:
    with needs("cryptography"):
        from kvcluster.cli import certificates
    made = certificates.new_authority(options.cluster, days=options.days, now=_now())
    folder = Path(options.folder)
    with _errors(f"write to {folder}"):
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            raise ConfigError(
                f"{folder} is there already, and its CA may be in use: give another folder, or remove it first"
            ) from None
        try:
            with locked(folder, make=False) as opened:
                _put(opened, {_CA_KEY: _NewFile(made.key, _SECRET), _CA: _NewFile(made.certificate, _SECRET)})
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    print(
        f"wrote {_CA} and {_CA_KEY} to {folder}: the CA of cluster {options.cluster} until {_day(made.until)}\n"
        f"give {_CA} to all processes; who has {_CA_KEY} can act as each of them"
    )
    return 0


def _issue(options: argparse.Namespace) -> int:
    with needs("cryptography"):
        from kvcluster.cli import certificates
    subject = certificates.subject_of(options.role, options.tenant, options.name)
    ca, authority = _authority(options.folder)
    pair = certificates.issue(authority, subject, days=options.days, now=_now())
    folder = Path(options.to)
    with _errors(f"write to {folder}"), locked(folder, make=True) as opened:
        _check_folder(opened, folder)
        _check_free(opened, folder, options.folder, ca)
        files = {_CA: _NewFile(ca, _PUBLIC), _KEY: _NewFile(pair.key, _SECRET)}
        _put(opened, {**files, _CERTIFICATE: _NewFile(pair.certificate, _PUBLIC)})
    _tell(folder, pair, subject.roles, subject.names)
    return 0


def _check_free(opened: int, folder: Path, authority: str, ca: bytes) -> None:
    """Raises ConfigError if the folder has files that may be in use. `ca`: its ca.crt may be this."""
    if _found(opened, _CA_KEY) is not None:
        raise ConfigError(f"{folder} is the folder of a CA, whose key no process should have: give another --to")
    for name in (_CERTIFICATE, _KEY):
        if _found(opened, name) is not None:
            raise ConfigError(
                f"{folder / name} is there already, and may be in use: `kvcluster certs renew {folder} --ca "
                f"{authority}` renews it, or give another --to"
            )
    if _found(opened, _CA) is not None and _read(folder / _CA, within=opened) != ca:
        raise ConfigError(f"{folder / _CA} is another CA, which may be trusted there: remove it, or give another --to")


def _renew(options: argparse.Namespace) -> int:
    with needs("cryptography"):
        from kvcluster.cli import certificates
    _, authority = _authority(options.ca)
    folder = Path(options.folder)
    with _errors(f"renew {folder}"), locked(folder, make=False) as opened:
        _check_folder(opened, folder)
        _finish_renewal(opened, folder)
        subject = certificates.issued_subject(authority, _read(folder / _CERTIFICATE, within=opened))
        pair = certificates.issue(authority, subject, days=options.days, now=_now())
        key, certificate = (_found(opened, name) for name in (_KEY, _CERTIFICATE))
        _put(
            opened,
            {_KEY: _NewFile(pair.key, _SECRET, key), _CERTIFICATE: _NewFile(pair.certificate, _PUBLIC, certificate)},
        )
    _tell(folder, pair, subject.roles, subject.names)
    return 0


def _finish_renewal(opened: int, folder: Path) -> None:
    """Puts the certificate of a renewal that was cut off between its two renames in its place. Raises ConfigError if
    the key belongs to no certificate of the folder."""
    from kvcluster.cli.certificates import is_pair

    key = _read(folder / _KEY, within=opened, denied=stat.S_IRWXO)
    if is_pair(_read(folder / _CERTIFICATE, within=opened), key):
        return
    cut_off = f"{_CERTIFICATE}{_NEW}"
    if _found(opened, cut_off) is None or not is_pair(_read(folder / cut_off, within=opened), key):
        raise ConfigError(
            f"{_KEY} is not the key of {_CERTIFICATE} in {folder}: restore the two files of one certificate, or "
            "`kvcluster certs issue` into another folder"
        )
    os.rename(cut_off, _CERTIFICATE, src_dir_fd=opened, dst_dir_fd=opened)
    os.fsync(opened)


def _show(options: argparse.Namespace) -> int:
    with needs("cryptography"):
        from kvcluster.cli.certificates import certificate_facts
    path = Path(options.path)
    with _errors(f"read {path}"):
        if path.is_dir():
            path = next((each for name in (_CERTIFICATE, _CA) if (each := path / name).exists()), path / _CERTIFICATE)
        beside = path.parent / _CA
        facts = certificate_facts(_read(path), _read(beside) if beside.exists() else None, _now())
    print_figures({"file": str(path), **facts}, add_certificate, as_json=options.json)
    return 0 if facts["valid_now"] and facts["verified"] is not False else 1


def add_certificate(page: TextPage, facts: Mapping[str, Any]) -> None:
    """Adds what `show` tells of a certificate."""
    left, valid = facts["days_left"], facts["valid_now"]
    when = counted(left, "day") + " left" if valid else "it has ended" if left < 0 else "it has not begun"
    verified = {None: "is not beside it", True: "verifies it", False: f"does not verify it: {facts['why']}"}
    page.say(facts["file"], label="certificate  ", tone=Tone.HEAD)
    page.say("of a CA" if facts["ca"] else ", ".join(facts["roles"]) or "none", label="roles        ")
    page.say(", ".join(facts["names"]) or "none", label="names        ")
    page.say(facts["issuer"], label="issuer       ")
    begin, end = (f"{datetime.fromisoformat(facts[name]):%Y-%m-%d %H:%M}" for name in ("valid_from", "valid_until"))
    page.say(f"from {begin} until {end} UTC: {when}", label="valid        ", tone=None if valid else Tone.BAD)
    page.say(facts["sha256"], label="SHA-256      ")
    page.say(verified[facts["verified"]], label="ca.crt       ", tone=Tone.BAD if facts["verified"] is False else None)


def _tell(folder: Path, pair: CertPair, roles: tuple[str, ...], names: tuple[str, ...]) -> None:
    known = f", known as {', '.join(names)}" if names else ""
    print(f"wrote {_CERTIFICATE} and {_KEY} to {folder}: {', '.join(roles)}{known}, until {_day(pair.until)}")


def _day(when: datetime) -> str:
    return f"{when:%Y-%m-%d}"


# -------------------------------------------------------------------------------------------------- files


class _NewFile(NamedTuple):
    """The content of a file to write. `mode`: if it replaces none; else it takes mode and owner of the one `before`."""

    data: bytes
    mode: int
    before: os.stat_result | None = None


@contextmanager
def _errors(doing: str) -> Iterator[None]:
    """Raises a ConfigError for an OSError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot {doing}: {error.strerror}") from None


def _authority(text: str) -> tuple[bytes, CertAuthority]:
    """Returns the content of ca.crt, and the CA of that folder. Raises ConfigError."""
    from kvcluster.cli.certificates import read_authority

    folder = Path(text)
    with _errors(f"read {folder}"):
        if not (folder / _CA).exists() or not (folder / _CA_KEY).exists():
            raise ConfigError(f"{folder} is no folder with {_CA} and {_CA_KEY}: `kvcluster certs init` makes one")
        with locked(folder, make=False) as opened:
            _check_folder(opened, folder)
            ca, key = _read(folder / _CA), _read(folder / _CA_KEY, denied=_OTHERS)
    return ca, read_authority(ca, key)


def _check_folder(opened: int, folder: Path) -> None:
    if os.fstat(opened).st_mode & stat.S_IWOTH:
        raise ConfigError(f"every user of this machine can write to {folder}: `chmod o-w {folder}`")


def _read(path: Path, *, within: int | None = None, denied: int = 0) -> bytes:
    """Returns the content of a file. `within`: its opened folder, in which it must be a file with one name: whoever
    owns that folder could have a renewal read the key of another process by a link. `denied`: of a private key, the
    rights that its mode may not have. Raises ConfigError."""
    # Of a pipe, `open` would wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | (os.O_NOFOLLOW if within is not None else 0)
    if within is not None:
        _found(within, path.name)
    with (
        _errors(f"read {path}"),
        open(os.open(path if within is None else path.name, flags, dir_fd=within), "rb") as file,
    ):
        about = os.fstat(file.fileno())
        data = file.read(limits.CERTIFICATE_FILE_BYTES + 1) if stat.S_ISREG(about.st_mode) else b""
    if within is not None and about.st_nlink > 1:
        raise ConfigError(f"{path} has other names, of other folders: copy it here and remove this one")
    most = limits.CERTIFICATE_FILE_BYTES
    if not 0 < len(data) <= most:
        raise ConfigError(f"{path} is no file of 1 to {most} bytes: give a certificate or key in PEM")
    if about.st_mode & denied:
        who = "go" if denied & stat.S_IRWXG else "o"
        raise ConfigError(f"other users of this machine can use {path}: `chmod {who}-rwx {path}`")
    return data


def _found(opened: int, name: str) -> os.stat_result | None:
    """Returns what that name of the folder is, None if it is nothing. Raises ConfigError for what is no file, such as
    the links of a volume of Kubernetes, which only Kubernetes replaces."""
    try:
        found = os.stat(name, dir_fd=opened, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{name} is a link or no file: renew it where it was made, or give another folder")
    return found


def _put(opened: int, files: Mapping[str, _NewFile]) -> None:
    """Writes these files of an opened folder: each is on disk whole under a temporary name before the first takes its
    place, in the order that is given. `replace_file` does the same for one file, and would give the key of a server to
    the user who renews it. Raises OSError."""
    for name, file in files.items():
        with suppress(FileNotFoundError):  # of a process that was killed
            os.unlink(f"{name}{_NEW}", dir_fd=opened)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(f"{name}{_NEW}", flags, _SECRET, dir_fd=opened), "wb") as new:
            _set_owner(new.fileno(), opened, file.before)
            os.fchmod(new.fileno(), file.mode if file.before is None else stat.S_IMODE(file.before.st_mode))
            new.write(file.data)
            new.flush()
            os.fsync(new.fileno())
    os.fsync(opened)
    for name in files:
        os.rename(f"{name}{_NEW}", name, src_dir_fd=opened, dst_dir_fd=opened)
    os.fsync(opened)


def _set_owner(new: int, opened: int, before: os.stat_result | None) -> None:
    """Gives a new file to the owner of the one that it replaces; that of root, without one, to the folder's."""
    owner = before if before is not None else os.fstat(opened) if os.geteuid() == 0 else None
    now = os.fstat(new)
    if owner is not None and (owner.st_uid, owner.st_gid) != (now.st_uid, now.st_gid):
        os.fchown(new, owner.st_uid, owner.st_gid)
