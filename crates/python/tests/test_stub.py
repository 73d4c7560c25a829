"""The stub says what the native half has, no more and no less."""

import ast
import inspect
import pathlib
import sys
import unittest

import prepared_kda
from prepared_kda import _native
from support import documented

STUB = pathlib.Path(prepared_kda.__file__).with_name("_native.pyi")


def public(names):
    return {name for name in names if not name.startswith("_")}


def functions(node):
    return [entry for entry in node.body if isinstance(entry, ast.FunctionDef)]


class Stub(unittest.TestCase):
    def setUp(self):
        self.tree = ast.parse(STUB.read_text())
        self.classes = {n.name: n for n in self.tree.body if isinstance(n, ast.ClassDef)}

    def test_the_same_names(self):
        variables = {
            n.target.id for n in self.tree.body if isinstance(n, ast.AnnAssign)
        }
        listed = (set(self.classes) | variables) - {"__all__"}
        self.assertEqual(set(_native.__all__), listed)
        found = public(dir(_native)) | {"__version__"}
        self.assertEqual(listed, found)
        self.assertGreaterEqual(set(prepared_kda.__all__), found)
        for name in prepared_kda.__all__:
            self.assertTrue(hasattr(prepared_kda, name), name)

    def test_the_same_members(self):
        for name, node in self.classes.items():
            listed = public(f.name for f in functions(node))
            self.assertEqual(listed, public(dir(getattr(_native, name))), name)

    def test_the_same_parameters(self):
        checked = 0
        for name, node in self.classes.items():
            kind = getattr(_native, name)
            for function in functions(node):
                decorators = {ast.unparse(d) for d in function.decorator_list}
                if "property" in decorators:
                    self.assertTrue(inspect.isgetsetdescriptor(getattr(kind, function.name)))
                    continue
                if function.name == "__new__" and sys.version_info < (3, 11):
                    continue  # no signature of a native type there
                method = kind if function.name == "__new__" else getattr(kind, function.name)
                found = inspect.signature(method)
                arguments = function.args
                listed = [a.arg for a in arguments.args[1:] + arguments.kwonlyargs]
                required = len(arguments.args) - 1 - len(arguments.defaults)
                optional = {a.arg for a in arguments.args[1 + required :]}
                for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
                    if default is not None:
                        optional.add(argument.arg)
                parameters = [p for p in found.parameters.values() if p.name != "self"]
                where = f"{name}.{function.name}"
                if parameters and parameters[-1].kind == inspect.Parameter.VAR_KEYWORD:
                    parameters.pop()
                    by_name = [n for n in listed if n in prepared_kda.OPERANDS]
                    self.assertEqual(set(by_name), set(prepared_kda.OPERANDS), where)
                    listed = [n for n in listed if n not in by_name]
                self.assertEqual([p.name for p in parameters], listed, where)
                for p in parameters:
                    has_default = p.default is not inspect.Parameter.empty
                    self.assertEqual(has_default, p.name in optional, f"{where} {p.name}")
                checked += 1
        self.assertGreaterEqual(checked, 8)

    def test_every_member_is_described(self):
        for name, node in self.classes.items():
            self.assertTrue(ast.get_docstring(node), name)
            for function in functions(node):
                if name != "Plan" or function.name != "__new__":
                    self.assertTrue(ast.get_docstring(function), f"{name}.{function.name}")

    def test_the_package_is_marked_as_typed(self):
        self.assertTrue(STUB.with_name("py.typed").exists())


class Documentation(unittest.TestCase):
    def test_the_documented_examples_use_what_exists(self):
        for text in documented():
            tree = ast.parse(text)
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module == "prepared_kda":
                    for alias in node.names:
                        self.assertTrue(hasattr(prepared_kda, alias.name), alias.name)


if __name__ == "__main__":
    unittest.main()
