"""Runs a program, then a test of it, and writes the marker if the test holds.

Standard input has four pieces: statements before the program, the program, the test as JSON, and
the marker. Each is its length in 16 digits, and its bytes.

Two processes share the work. The judge reads the test and the marker, and runs neither the program
nor the test. The worker runs the program, asks for the test with a key, runs it, and reports its
end with another key. While the program runs, no variable of a frame has the key: the function that
has it is a value on a stack. The test starts only if no thread or process of the program is left,
which could read a key from a pipe.
"""

import gc
import json
import marshal
import os
import signal
import sys


def pieces():
    """Returns the functions that read and write a piece. They look nothing up in this module or
    among the built-in functions, which the program can change."""
    read, write, size, number, end = os.read, os.write, len, int, EOFError

    def take(source, count):
        data = b""
        while size(data) < count:
            more = read(source, count - size(data))
            if not more:
                raise end
            data += more
        return data

    def receive(source):
        return take(source, number(take(source, 16)))

    def send(sink, data):
        data = b"%016d" % size(data) + data
        while data:
            data = data[write(sink, data) :]

    return receive, send


receive, send = pieces()


def process_option(option, value):
    """Sets an option of this process: prctl of Linux."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except Exception:
        # Not every interpreter or system has it.
        pass


def make_visible(is_visible):
    """Decides whether other processes of this user see the memory and the pipes of this one."""
    process_option(4, is_visible)


def enter_domain():
    """Puts this process into a domain of Landlock, from which it reads no process outside, not even
    as root. It forbids no more than to make block devices, and to move a file into another folder
    where the kernel is older than version 5.19."""
    try:
        import ctypes

        kernel = ctypes.CDLL(None).syscall
        make_block, refer = 1 << 11, 1 << 13
        access = refer if kernel(444, None, 0, 1) > 1 else 0
        domain = kernel(444, ctypes.byref(ctypes.c_uint64(make_block | access)), 8, 0)
        root = os.open("/", os.O_PATH)
        rule = (access | root << 64).to_bytes(12, sys.byteorder)
        if access:
            kernel(445, domain, 1, rule, 0)
        os.close(root)
        process_option(38, 1)
        kernel(446, domain, 0)
        os.close(domain)
    except Exception:
        # Not every interpreter or system has it.
        pass


def adopt_orphans():
    """Makes this process the parent of processes below it whose parent has ended."""
    process_option(36, 1)


def is_crowded(worker):
    """Whether processes other than the worker run below this one, as far as /proc shows that."""
    found = descendants(os.getpid())
    return worker in found and len(found) > 1


def descendants(process):
    """The numbers of the processes below one that still run, or none on a system without /proc."""
    parents = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name) as file:
                    # The name of a program may have spaces and brackets.
                    state, parent = file.read().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state not in "ZX":
                parents[int(name)] = int(parent)
    found, last = set(), {process}
    while last:
        last = {child for child, parent in parents.items() if parent in last} - found
        found |= last
    return found


def main():
    """Becomes the judge, which does not return, and the worker, which returns its steps."""
    before, program = receive(0), receive(0)
    key = os.urandom(16)
    make_visible(0)
    asked, ask = os.pipe()
    told, tell = os.pipe()
    worker = os.fork()
    if worker:
        os.close(ask)
        os.close(told)
        # The program can write modules into the current folder.
        sys.path[:] = filter(None, sys.path)
        signal.signal(signal.SIGCHLD, lambda *_: os.waitpid(worker, os.WNOHANG)[0] and os._exit(1))
        adopt_orphans()
        try:
            judge(worker, asked, tell, key)
        finally:
            os._exit(1)
    make_visible(1)
    enter_domain()
    # The numbers of its pipes differ each time. It has an empty input, and its output is that of
    # errors.
    place = 64 + os.urandom(1)[0] % 64
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.dup2(ask, place, False)
    os.dup2(told, place + 64, False)
    for other in (nothing, asked, ask, told, tell):
        os.close(other)
    # Names of its objects lead to the module, and so do imports of tests.
    module = type(sys)("solution")
    sys.modules["solution"] = sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    exec(compile(before, "<before>", "exec", 0, True), module.__dict__)
    code = compile(program, "<program>", "exec", 0, True)
    last = after_program(place, place + 64, key, module.__dict__)
    gc.collect()
    if hasattr(gc, "freeze"):
        gc.freeze()
    return [(code, module.__dict__), sys.settrace, sys.setprofile, last]


def after_program(ask, told, key, names):
    """Returns the function that follows the program, with everything that it needs: the program can
    change modules and built-in functions."""
    take_piece, give_piece, leave = receive, send, os._exit
    load, to_json, run, evaluate, get = marshal.loads, json.dumps, exec, eval, getattr
    import_module, size, merge, pairs, anything = __import__, len, dict, zip, BaseException
    # Of threads of Python: those of libraries for linear algebra live as long as the process.
    threads = getattr(sys, "_current_frames", lambda: [None])

    def find(name):
        if name in names:
            return names[name]
        if name.isidentifier():
            return get(names["Solution"](), name)
        return evaluate(name, names)

    def plain(value):
        return get(value, "tolist")()

    def run_unittest(classes):
        unittest = import_module("unittest")
        for name in classes:
            suite = unittest.defaultTestLoader.loadTestsFromTestCase(names[name])
            result = unittest.TestResult()
            suite.run(result)
            if not result.wasSuccessful():
                leave(1)

    def run_methods(name, methods):
        owner = names[name]
        get(owner, "setup_class", anything)()
        for method in methods:
            instance = owner()
            prepare(instance, "setup_method", method)
            run_function(get(instance, method))
            prepare(instance, "teardown_method", method)
        get(owner, "teardown_class", anything)()

    def prepare(instance, step, method):
        """Calls what pytest calls around a method, which it may take as an argument."""
        function = get(instance, step, None)
        if function is not None:
            takes_it = get(get(function, "__code__", None), "co_argcount", 1) > 1
            function(*[get(instance, method)][: takes_it])

    def run_function(function):
        """Calls a test of pytest for each choice of its parameters."""
        choices = [{}]
        for mark in get(function, "pytestmark", ()):
            if mark.name == "parametrize":
                argument = merge(pairs(("argnames", "argvalues"), mark.args), **mark.kwargs)
                keys, rows = argument["argnames"], argument["argvalues"]
                if get(keys, "split", None) is not None:
                    keys = [key.strip() for key in keys.split(",")]
                more = []
                for row in rows:
                    if get(row, "marks", None) is not None:
                        row = row.values
                    elif size(keys) == 1:
                        row = (row,)
                    more.append(merge(pairs(keys, row)))
                choices = [merge(old, **new) for old in choices for new in more]
        for choice in choices:
            result = function(**choice)
            if get(result, "cr_frame", None) is not None:
                import_module("asyncio").run(result)

    def run_with_candidate(plan, count):
        """Runs a test of a function, which is the named one or, without a name, each function of the
        program until one passes."""
        variable, name = plan["entry"]
        candidates = [find(name)] if name else own_functions()
        for candidate in candidates:
            names[variable] = candidate
            count.clear()
            try:
                run(load(plan["code"]), names)
            except anything:
                continue
            if count:
                return
        leave(1)

    def own_functions():
        found = [value for value in names.values() if get(value, "__globals__", None) is names]
        solution = names.get("Solution")
        if solution is not None:
            methods = [name for name in solution.__dict__ if not name.startswith("_")]
            found += [get(solution(), name) for name in methods]
        return found

    def run_plan(plan):
        if "arguments" in plan:
            return to_json(find(plan["function"])(*plan["arguments"]), default=plain).encode()
        count = []
        # A test is the main program, and the program is not.
        names["__name__"] = "__main__"
        names[plan["counter"]] = lambda: count.append(0)
        if plan["entry"]:
            run_with_candidate(plan, count)
        else:
            run(load(plan["code"]), names)
        run_unittest(plan["cases"])
        for name, methods in plan["classes"]:
            run_methods(name, methods)
        for name in plan["functions"]:
            run_function(names[name])
        return to_json(size(count)).encode()

    def last(_):
        try:
            if size(threads()) > 1:
                leave(1)
            give_piece(ask, key)
            plan = load(take_piece(told))
            # The key of the end is on the stack while the test calls the program, and in no
            # variable.
            give_piece(ask, take_piece(told) + run_plan(plan))
            # The judge ends this process.
            take_piece(told)
        except anything:
            pass
        leave(1)

    return last


def judge(worker, asked, tell, key):
    """Gives the test to the worker, and writes the marker if the test holds."""
    test = json.loads(receive(0))
    marker = receive(0)
    try:
        plan, holds = call_plan(test) if "function" in test else statement_plan(test)
    except (SyntaxError, ValueError, RecursionError) as error:
        message = " ".join(str(error).split())
        os.write(1, marker + b" " + message.encode("utf-8", "replace"))
        os._exit(0)
    if receive(asked) != key or is_crowded(worker):
        return
    done = os.urandom(16)
    send(tell, marshal.dumps(plan))
    send(tell, done)
    answer = receive(asked)
    if answer.startswith(done) and holds(json.loads(answer[len(done) :])):
        os.write(1, marker)
        os._exit(0)


def call_plan(test):
    """The call of a function, and the check of its result."""
    arguments, expected = test["arguments"], test["expected"]
    values = [expected]
    if isinstance(arguments, str):
        arguments = [json.loads(line) for line in arguments.split("\n") if line.strip()]
        if isinstance(expected, str):
            try:
                values = [json.loads(expected)]
            except ValueError:
                values = [expected.strip()]
    elif isinstance(expected, list) and len(expected) == 1:
        values.append(expected[0])
    values += [with_large_integers(value) for value in values]
    arguments = [with_integer_keys(argument) for argument in arguments]
    return {"function": test["function"], "arguments": arguments}, values.__contains__


def with_integer_keys(value):
    """An object whose keys are all integers has them as numbers, which JSON lacks."""
    try:
        return {int(key): entry for key, entry in value.items()}
    except (AttributeError, ValueError):
        return value


def with_large_integers(value):
    """The integers that the texts of digits in a value may stand for: in a row, an integer that no 64
    bits hold is a text."""
    if isinstance(value, list):
        return [with_large_integers(entry) for entry in value]
    if isinstance(value, dict):
        return {key: with_large_integers(entry) for key, entry in value.items()}
    if isinstance(value, str) and 19 <= len(value) <= 4000 and value.lstrip("-").isdigit():
        try:
            number = int(value)
        except ValueError:
            return value
        return number if str(number) == value and not -(2**63) <= number < 2**64 else value
    return value


def statement_plan(test):
    """The code of a test that counts its assertions, and the tests that its definitions are."""
    import ast

    statements = ast.parse(test["text"], "<test>").body
    ensure_modules(statements)
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    definitions = functions + (ast.ClassDef, ast.Lambda)
    mark = os.urandom(8).hex()
    plan = {"counter": "_counter_" + mark, "entry": None, "cases": [], "classes": [], "functions": []}

    def inside(node):
        """The nodes below one, without those of definitions."""
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, definitions):
                yield child
                yield from inside(child)

    def called(node):
        """The last name of the function that a node calls."""
        function = node.func if isinstance(node, ast.Call) else None
        return getattr(function, "attr", getattr(function, "id", ""))

    runners = ["unittest", "pytest"]
    runners += [
        name.asname or name.name
        for statement in statements
        if isinstance(statement, ast.ImportFrom) and statement.module in runners
        for name in statement.names
        if name.name == "main"
    ]

    def is_runner(node):
        """Returns whether a node calls `unittest.main`. It would search for tests in this module,
        whose tests run anyway, and end the process."""
        function = getattr(node, "func", None)
        owner = getattr(function, "value", None)
        of_module = getattr(function, "attr", "") == "main" and getattr(owner, "id", "") in runners
        return of_module or getattr(function, "id", "") in runners

    def is_check(node):
        return called(node).startswith("assert") or called(node) in test["checks"]

    def is_failure(node):
        never = isinstance(node, ast.Assert) and not getattr(node.test, "value", True)
        return never or isinstance(node, ast.Raise) or called(node) in test["exits"]

    def asserts(node):
        return isinstance(node, ast.Assert) or is_check(node) or is_failure(node)

    def catches_failures(statement):
        """Returns whether a `try` ends the failure of an assertion in it."""
        failures = {"AssertionError", "Exception", "BaseException"}
        for handler in getattr(statement, "handlers", []):
            caught = getattr(handler.type, "elts", [handler.type])
            names = {getattr(part, "attr", getattr(part, "id", None)) for part in caught}
            is_caught = handler.type is None or failures & names
            if is_caught and not any(map(is_failure, inside(handler))):
                return True
        return False

    def counted(statements):
        """The statements, with a count of each assertion that has not failed."""
        result = []
        for statement in statements:
            call = ast.Call(ast.Name(plan["counter"], ast.Load()), [], [])
            count = ast.fix_missing_locations(ast.copy_location(ast.Expr(call), statement))
            nodes = [] if isinstance(statement, definitions) else list(inside(statement))
            is_block = hasattr(statement, "body") or hasattr(statement, "cases")
            if not is_block and any(map(is_runner, nodes)):
                statement = ast.copy_location(ast.Pass(), statement)
            # Reaching a block with a failure counts: the program passes by not failing there. So
            # does reaching a `try` with an assertion, which an expected exception may skip.
            handlers = getattr(statement, "handlers", [])
            escapes = handlers and any(map(asserts, nodes)) and not catches_failures(statement)
            if is_block and (escapes or any(map(is_failure, nodes))):
                result.append(count)
            count_blocks(statement)
            result.append(statement)
            if is_block:
                heads = [part for item in getattr(statement, "items", []) for part in ast.walk(item)]
                holds = any(map(is_check, heads))
            else:
                # Functions without a name may run in it.
                holds = not isinstance(statement, definitions) and any(
                    map(asserts, ast.walk(statement))
                )
            if holds:
                result.append(count)
        return result

    def count_blocks(node):
        for field in ("body", "orelse", "finalbody"):
            if isinstance(getattr(node, field, None), list):
                setattr(node, field, counted(getattr(node, field)))
        for part in getattr(node, "handlers", []) + getattr(node, "cases", []):
            count_blocks(part)

    used = {
        node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name)
    }
    bases = {"TestCase", "IsolatedAsyncioTestCase"}
    for statement in statements:
        if isinstance(statement, ast.ClassDef):
            tests = [part for part in statement.body if isinstance(part, functions)]
            tests = [part for part in tests if part.name.startswith("test")]
            if bases & {getattr(base, "attr", getattr(base, "id", "")) for base in statement.bases}:
                bases.add(statement.name)
                plan["cases"].append(statement.name)
            elif statement.name.startswith("Test") and tests:
                for part in tests:
                    ensure_no_fixtures(part, 1)
                plan["classes"].append((statement.name, [part.name for part in tests]))
        elif isinstance(statement, functions) and statement.name.startswith("test"):
            # What the text uses is a function of the test, and no test of pytest.
            if statement.name not in used and statement.name not in test["candidates"]:
                ensure_no_fixtures(statement, 0)
                plan["functions"].append(statement.name)
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assert) and getattr(node.test, "elts", []):
                raise ValueError("line %d: an assertion of a tuple, which is always true" % node.lineno)
    if test["candidates"]:
        plan["entry"] = ("_entry_" + mark, test["entry"])
    for name in test["candidates"]:
        statements += ast.parse("%s(%s)" % (name, plan["entry"][0])).body
    tree = ast.Module(counted(statements), [])
    plan["code"] = marshal.dumps(compile(tree, "<test>", "exec", 0, True))
    return plan, lambda count: count > 0


def ensure_modules(statements):
    """Refuses a test that imports a module which the interpreter lacks."""
    from importlib.util import find_spec

    for statement in statements:
        modules = [name.name for name in getattr(statement, "names", []) if hasattr(name, "name")]
        if hasattr(statement, "level"):
            modules = [statement.module] if statement.level == 0 else []
        for module in modules:
            package = module.split(".")[0]
            if package not in ("solution", "__main__") and find_spec(package) is None:
                raise ValueError("import of %s: %s has no such module" % (module, sys.executable))


def ensure_no_fixtures(function, own):
    """Refuses fixtures of pytest: parameters without a value, after the first `own` ones."""
    from ast import dump

    required = len(function.args.args) - len(function.args.defaults) - own
    has_parameters = any("parametrize" in dump(mark) for mark in function.decorator_list)
    if required > 0 and not has_parameters:
        names = (function.name, function.args.args[own].arg)
        raise ValueError("%s: %r is a fixture of pytest, which is not supported" % names)


steps = main()
try:
    # The values are on the stack only while the program runs. Its own result is None, which ends
    # tracing and profiling.
    steps.pop()(steps.pop()(steps.pop()(exec(*steps.pop()))))
except BaseException:
    os._exit(1)
