"""The image: no root, and no host that is not the job's. It cannot be built here; its files are looked at, and run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"


def test_both_images_end_as_a_user() -> None:
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    for name in ("cpu", "cuda"):
        stage = next(stage for stage in stages if re.match(rf"\S+ AS {name}\n", stage))
        assert re.findall(r"^USER (\S+)", stage, flags=re.MULTILINE) == ["star"]
        assert stage.index("system.sh user") < stage.index("USER star") < stage.index("ENTRYPOINT")
        assert "/opt/star/docker/bin:" in stage, "the ssh that checks hosts comes first"


def test_the_commands_to_run_a_job_bring_the_program_and_the_gpus() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n#", " ")
    commands = re.findall(r"^# +(docker run .*)$", text, flags=re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        words = shlex.split(command)
        assert words[words.index("-v") + 1] == "$PWD:/workspace", command
        assert ("--gpus=all" in words) == ("star-hvd:cuda" in words), command
        assert ("$PWD/ssh:/run/star-ssh:ro" in words) == ("--network=host" in words), command
    assert text.count("WORKDIR /workspace") == 2


def test_nothing_switches_host_checking_off() -> None:
    for path in (ROOT / "Dockerfile", *DOCKER.rglob("*"), *(ROOT / "scripts").glob("*.sh")):
        if path.is_file():
            said = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
            assert not re.search(r"StrictHostKeyChecking[ =]no|UserKnownHostsFile[ =]/dev/null", "\n".join(said)), path


@pytest.mark.skipif(not Path("/usr/bin/ssh").exists(), reason="needs ssh")
@pytest.mark.parametrize("asked", ["no", "accept-new", "off"])
def test_the_ssh_of_the_image_checks_hosts_whatever_horovodrun_asks(asked: str) -> None:
    command = [DOCKER / "bin/ssh", "-G", "-F", DOCKER / "ssh.conf", "-o", f"StrictHostKeyChecking={asked}", "host1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "stricthostkeychecking true" in done.stdout.lower().splitlines()


def run_entry_point(
    folder: Path, keys: Path, *, user_home: Path | None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the entry point with an sshd that only notes its options, as a user with `user_home` in the system's list."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    sshd, getent, script = programs / "sshd", programs / "getent", folder / "entrypoint.sh"
    sshd.write_text(f'#!/bin/sh\necho "$@" > {folder}/sshd.said\n')
    getent.write_text(
        "#!/bin/sh\nexit 2\n" if user_home is None else f"#!/bin/sh\necho star:x:1000:1000::{user_home}:/bin/sh\n"
    )
    for program in (sshd, getent):
        program.chmod(0o755)
    if user_home is not None:
        user_home.mkdir(exist_ok=True)
    script.write_text((DOCKER / "entrypoint.sh").read_text().replace("/usr/sbin/sshd", str(sshd)))
    environ = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "STAR_SSH_KEYS": str(keys), **variables}
    command = ["sh", str(script), "echo", "started"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("listed", "said"), [(True, "/home of the image"), (False, "no home")])
def test_the_entry_point_refuses_ssh_for_a_user_without_this_home(tmp_path: Path, listed: bool, said: str) -> None:
    """ssh reads `known_hosts` and keys in the home of the system's list, and ends if the user is not in it."""
    other = tmp_path / "home of the image"
    given = {"user_home": other if listed else None, "HOME": str(tmp_path)}
    refused = run_entry_point(tmp_path, tmp_path / "keys", STAR_SSHD="1", **given)  # type: ignore[arg-type]
    assert refused.returncode == 2 and said in refused.stderr and "user, number 1000" in refused.stderr
    assert not (tmp_path / ".ssh").exists()
    without = run_entry_point(tmp_path, tmp_path / "keys", STAR_SSHD="0", **given)  # type: ignore[arg-type]
    assert without.returncode == 0 and without.stdout == "started\n", "a job on one host needs no ssh"


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_the_entry_point_asks_for_both_key_pairs_and_knows_one_host_key(tmp_path: Path) -> None:
    keys, home = tmp_path / "keys", tmp_path / "home"
    keys.mkdir()

    def run() -> subprocess.CompletedProcess[str]:
        return run_entry_point(tmp_path, keys, user_home=home, HOME=str(home), STAR_SSHD="1")

    for name in ("id_ed25519", "host_ed25519"):
        refused = run()
        assert refused.returncode == 2 and f"got no {keys}/{name}.pub" in refused.stderr
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True, timeout=60)
    done = run()
    assert done.returncode == 0 and done.stdout == "started\n"
    public = " ".join((keys / "host_ed25519.pub").read_text().split()[:2])
    assert (home / ".ssh/known_hosts").read_text() == f"* {public}\n"
    assert (home / ".ssh/id_ed25519").stat().st_mode & 0o077 == 0
    assert f"-h {home}/.ssh/host_ed25519" in (tmp_path / "sshd.said").read_text()
