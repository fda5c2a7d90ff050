"""How long a step takes, seen from another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from engine.process.pulse import Pulse, shared_handle

ROOT = Path(__file__).resolve().parents[3]
BEAT = "import sys; from engine.process.pulse import Pulse; Pulse(int(sys.argv[1])).beat()"


def test_another_process_s_beat_is_seen_and_goes_on_without_it() -> None:
    handle = shared_handle()
    pulse = Pulse(handle)
    assert pulse.step_seconds == 0
    command = [sys.executable, "-c", BEAT, str(handle)]
    subprocess.run(command, pass_fds=[handle], cwd=ROOT, check=True)
    os.close(handle)
    first = pulse.step_seconds
    assert 0 < first < pulse.step_seconds
    pulse.rest()
    assert pulse.step_seconds == 0
    pulse.beat()
    pulse.close()
    assert Pulse().step_seconds == pulse.step_seconds == 0
