from pathlib import Path
from harness import Results
def draw(results: Results, path: Path) -> None:
    path.write_bytes(b"")
