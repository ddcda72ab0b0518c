"""Compiles the modules that carry every small message, where that can be done; see asyncdist/compiled.py.

What cannot be compiled is left out, and runs interpreted: an installation never fails for want of a compiler. The stubs
of ``asyncdist.protocols`` are written here, too.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

TOP = Path(__file__).resolve().parent


def load_compiled():
    """asyncdist/compiled.py by its path: asyncdist itself needs torch."""
    spec = importlib.util.spec_from_file_location("asyncdist_compiled", TOP / "asyncdist" / "compiled.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def extensions(scratch: str) -> list[Extension]:
    """One for each module, named after the place where it is looked for; none where Cython is missing or fails."""
    compiled = load_compiled()
    place = compiled.folder()
    # pip runs this file three times for one installation, and two of these ask for metadata only.
    if not compiled.is_wanted() or {"egg_info", "dist_info"} & set(sys.argv):
        return []
    if "editable_wheel" in sys.argv and compiled.reason_against() is None:
        return []  # already compiled for another environment of this checkout
    try:
        from Cython.Build import cythonize
        from Cython.Compiler.Errors import CompileError
    except ImportError:
        print("asyncdist: no Cython, so nothing is compiled", file=sys.stderr)
        return []
    sources = {name: str(compiled.source_of(name).relative_to(TOP)) for name in compiled.MODULES}
    # On some machines, a fused multiply-add would round differently than Python does.
    arguments = ["-O2", "-g0", "-ffp-contract=off"]
    wanted = [
        Extension(f"asyncdist.{name}", [source], extra_compile_args=arguments) for name, source in sources.items()
    ]
    try:
        made = cythonize(
            wanted,
            build_dir=scratch,
            language_level=3,
            compiler_directives={"annotation_typing": False},  # the .pxd files declare the C types
            quiet=True,
        )
    except CompileError as error:
        print(f"asyncdist: Cython failed, so nothing is compiled: {error}", file=sys.stderr)
        place.mkdir(parents=True, exist_ok=True)
        (place / compiled.FAILED).touch()  # tools/setup need not try again
        made = []
    for extension in made:
        extension.optional = True  # Cython loses the attribute if it is set earlier
        name = extension.name.removeprefix("asyncdist.")
        extension.name = f"asyncdist._compiled.{place.name}.{name}"
    return made


class Build(build):
    """Begins with an empty folder: all that lies there goes into a wheel, also of modules that were deleted since."""

    def run(self) -> None:
        """Empty the folder, unless the caller has named one, and fill it."""
        if (TOP / "build") in Path(self.build_lib).resolve().parents:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildExtensions(build_ext):
    """Puts what is compiled into the checkout where that is what will be imported, and nothing there for a wheel.

    ``pip install .`` leaves the modules alone that an editable installation of the same checkout uses. Those of earlier
    sources go, from the checkout or from what a wheel is made of.
    """

    def run(self) -> None:
        """Compile, and tidy up."""
        is_editable = self.inplace or self.editable_mode
        modules = load_compiled()
        place = modules.folder()
        if is_editable:
            for module in modules.MODULES:  # no other code makes these folders
                place.joinpath(*module.split(".")).parent.mkdir(parents=True, exist_ok=True)
        self.parallel = True  # as many compilers at once as there are cores
        super().run()
        if is_editable and modules.reason_against() is not None:
            (place / modules.FAILED).touch()
        compiled = place.parent if is_editable else Path(self.build_lib, "asyncdist", place.parent.name)
        for folder in compiled.glob(f"{sys.implementation.cache_tag.replace('-', '_')}_*"):
            if folder.name != place.name:
                shutil.rmtree(folder)


class Wheel(bdist_wheel):
    """Names a wheel in which nothing is compiled as one of Python alone, which each machine can use."""

    def run(self) -> None:
        """Build, look what was compiled, and pack it."""
        self.run_command("build")
        made = Path(self.get_finalized_command("build").build_lib)
        if self.distribution.ext_modules and not any(made.rglob("*.so")):
            self.distribution.ext_modules = []
            self.root_is_pure = True
        super().run()


def long_description(readme: str) -> str:
    """Return the readme for readers without the checkout: links into it become words, and pictures are left out."""
    local = r"\((?![a-z]+://|#)[^()\s]+\)"
    text = re.sub(rf"^!\[[^]]*\]{local}\n+", "", readme, flags=re.MULTILINE)
    text = re.sub(rf"\[([^]]*)\]{local}", r"\1", text)
    return f"{text.rstrip()}\n\nThe pages that are named here are in the source archive, in the folder `docs`.\n"


if __name__ == "__main__":
    if (stubs := TOP / "tools" / "stubs").is_file():
        runpy.run_path(str(stubs), run_name="__main__")
    Path("build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir="build") as scratch:  # setuptools accepts only relative paths
        setup(
            ext_modules=extensions(scratch),
            cmdclass={"bdist_wheel": Wheel, "build": Build, "build_ext": BuildExtensions},
            long_description=long_description((TOP / "README.md").read_text(encoding="utf-8")),
            long_description_content_type="text/markdown",
        )
