"""Fetching Debian packages into a directory, without installing anything on the machine."""

import os
import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from dev.console import DevError, run, say

_HELP = "install Docker and use --docker, or point CDC_RELAY_TEST_*_URL at existing servers"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

# Pulled in by helper scripts of the server packages; the servers do not use them.
_UNUSED = re.compile(r"perl|libperl|libgdbm|libdb5|openssl-provider")
_TRIM = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/lintian", "usr/bin")


def is_debian() -> bool:
    """Tell whether this machine is Debian with apt."""
    try:
        release = Path("/etc/os-release").read_text()
    except OSError:
        return False
    ours = re.search(r'^ID="?debian"?$', release, re.MULTILINE) is not None
    return ours and shutil.which("apt-get") is not None and shutil.which("dpkg-deb") is not None


def unpack(package: str, suite: str, into: Path, keep: tuple[str, ...] = ()) -> str:
    """Unpack `package` of a Debian suite and its libraries into a tree; return its version.

    `keep` names files under usr/bin to keep. Nothing is installed and the machine's own apt state
    is not touched; the download is checked by apt against the archive's signatures.
    """
    if not is_debian():
        raise DevError(f"cannot fetch {package}: this is not a Debian machine with apt; {_HELP}")
    state = into / ".apt"
    for folder in ("state/lists/partial", "cache/archives/partial", "debs"):
        (state / folder).mkdir(parents=True)
    (state / "status").touch()
    (state / "sources.sources").write_text(
        f"Types: deb\nURIs: {_mirror()}\nSuites: {suite}\nComponents: main\nSigned-By: {_KEYRING}\n"
    )
    apt = ["apt-get", "-qq", *_options(state)]
    run([*apt, "update"])
    plan = run([*apt, "install", "--simulate", package])
    wanted: dict[str, str] = dict(re.findall(r"^Inst (\S+) \((\S+)", plan, re.MULTILINE))
    if package not in wanted:
        raise DevError(f"Debian {suite} has no {package}; {_HELP}")
    names = [name for name in wanted if not _UNUSED.match(name)]
    run([*apt, "download", *(f"{name}={wanted[name]}" for name in names)], cwd=state / "debs")
    debs = sorted((state / "debs").glob("*.deb"))
    say(f"unpacking {package} {wanted[package]} ({len(debs)} packages)")
    for deb in debs:
        run(["dpkg-deb", "-x", deb, into])
    shutil.rmtree(state)
    _trim(into, keep)
    return wanted[package]


def install(*packages: str) -> None:
    """Install packages on this machine (root on Debian only)."""
    if not is_debian() or os.geteuid() != 0:
        raise DevError(f"{' and '.join(packages)} are missing; install them, or: {_HELP}")
    say(f"installing {', '.join(packages)} with apt")
    run(["apt-get", "-qq", "update"])
    run(["apt-get", "-qq", "-y", "--no-install-recommends", "install", *packages])


def loader(tree: Path) -> list[str]:
    """Return the start of a command line that runs a program of the tree with its own libraries.

    The tree may be of another Debian release than the machine: its own C library goes with it.
    """
    found = [*tree.glob("usr/lib/*/ld-linux-*.so.*"), *tree.glob("lib/*/ld-linux-*.so.*")]
    if not found:
        raise DevError(f"no program loader in {tree}; remove that directory and fetch again")
    triplet = found[0].parent.name
    paths = [tree / "usr/lib" / triplet, tree / "lib" / triplet]
    return [str(found[0]), "--library-path", ":".join(str(path) for path in paths)]


def _options(state: Path) -> list[str]:
    settings = {
        "Dir::State": state / "state",
        "Dir::State::status": state / "status",
        "Dir::Cache": state / "cache",
        "Dir::Etc::sourcelist": state / "sources.sources",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Acquire::Languages": "none",
        "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false",
        "APT::Install-Recommends": "false",
    }
    if os.geteuid() == 0:
        # apt's own unprivileged user cannot write to a cache in root's home.
        settings["APT::Sandbox::User"] = "root"
    return [part for key, value in settings.items() for part in ("-o", f"{key}={value}")]


def _mirror() -> str:
    """Return the Debian mirror that the machine's own apt sources use."""
    form = ["--format", "$(REPO_URI)", "Created-By: Packages"]
    for uri in run(["apt-get", "indextargets", *form]).split():
        if urlsplit(uri).path.rstrip("/").endswith("/debian"):
            return uri
    raise DevError(f"no Debian mirror in this machine's apt sources; {_HELP}")


def _trim(tree: Path, keep: tuple[str, ...]) -> None:
    for name in _TRIM:
        folder = tree / name
        for entry in list(folder.iterdir()) if folder.is_dir() else []:
            if name == "usr/bin" and entry.name in keep:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
