#!/usr/bin/env bash
# Collect into .wheels/ the packages that tests/gpu and the benchmarks need and a bare GPU machine lacks (Python 3.12,
# torch 2.11, transformers 5.17, pytest, pyarrow, no deepspeed, no git, no network), and the commit of this tree.
# tools/gpu_check.sh installs them there. Call it again after each commit: what is there already is not fetched again.
# Needs a network and the virtual environment that `make` builds. Fails above 60 MB.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
wheels=$PWD/.wheels
limit_bytes=$((60 * 1000 * 1000))

# In the versions of constraints.txt, which everything else is tested with; the second group is what the first imports.
names=(deepspeed accelerate peft torchao trl datasets hjson jsonargparse psutil xxhash zstandard rich pytest-timeout
  einops msgpack ninja py-cpuinfo packaging tqdm markdown-it-py mdurl pygments PyYAML dill multiprocess
  pydantic pydantic-core annotated-types typing-extensions typing-inspection)
# On the machine already; its pytest goes with its own plugins. Left out, as nothing there imports them: wandb, matplotlib.
present=(torch numpy transformers tokenizers safetensors huggingface-hub pytest pyarrow pandas fsspec aiohttp requests
  httpx filelock jinja2)

mkdir -p "$wheels"
wanted=" "
platforms=(manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux_2_12_x86_64 manylinux2010_x86_64)
for name in "${names[@]}"; do
  version=$("$python" -c "from importlib.metadata import version; print(version('$name'))")
  file=$(echo "${name//-/_}" | tr '[:upper:]' '[:lower:]')-$version
  wanted+="$file "
  compgen -G "$wheels/$file-*.whl" >/dev/null && continue
  if [[ $name == deepspeed ]]; then # on PyPI as source only; without compiled operators it is pure Python
    DS_BUILD_OPS=0 "$python" -m pip wheel -q --no-deps --no-build-isolation -w "$wheels" "deepspeed==$version"
  else
    "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
      --abi cp312 --abi abi3 --abi none "${platforms[@]/#/--platform=}" -d "$wheels" "$name==$version"
  fi
done
for path in "$wheels"/*.whl; do # two versions of a package would stop pip
  file=$(basename "$path" | tr '[:upper:]' '[:lower:]' | cut -d- -f1,2)
  [[ $wanted == *" $file "* ]] || rm "$path"
done
"$python" tools/bench/machine.py >"$wheels/COMMIT"

"$python" - "$wheels" "${present[@]}" <<'PYTHON'
"""Every wheel fits Python 3.12, and every requirement is in the folder or on the machine."""
import re
import sys
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

folder, present = Path(sys.argv[1]), {canonicalize_name(name) for name in sys.argv[2:]}
files = sorted(folder.glob("*.whl"))
here = {parse_wheel_filename(file.name)[0] for file in files}
machine = {"python_version": "3.12", "python_full_version": "3.12.0", "extra": ""}
wrong = []
for file in files:
    tags = parse_wheel_filename(file.name)[3]
    if not any(re.fullmatch(r"py3|py2|py312|cp312", tag.interpreter) or tag.abi == "abi3" for tag in tags):
        wrong.append(f"{file.name}: not for Python 3.12")
    with ZipFile(file) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        for line in message_from_string(archive.read(metadata).decode()).get_all("Requires-Dist") or []:
            requirement = Requirement(line)
            needed = requirement.marker is None or requirement.marker.evaluate(machine)
            if needed and canonicalize_name(requirement.name) not in here | present:
                wrong.append(f"{file.name} requires {requirement}")
print("\n".join(wrong))
sys.exit(1 if wrong else 0)
PYTHON

tree_bytes=$(git ls-files -z --cached --others --exclude-standard | xargs -0 stat -c %s 2>/dev/null | awk '{s += $1} END {print s}')
wheel_bytes=$(stat -c %s "$wheels"/*.whl | awk '{s += $1} END {print s}')
total_bytes=$((tree_bytes + wheel_bytes))
echo "$(ls "$wheels"/*.whl | wc -l) wheels, $((wheel_bytes / 1000)) kB; with the source tree $((total_bytes / 1000)) kB"
if ((total_bytes > limit_bytes)); then
  echo "more than $((limit_bytes / 1000)) kB" >&2
  exit 1
fi
