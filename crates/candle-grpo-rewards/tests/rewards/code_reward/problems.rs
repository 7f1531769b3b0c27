//! Small problems, with right and wrong functions for each.

/// A function to write. The functions have the name `f`.
pub(super) struct Problem {
    /// Arguments, and the result as Python prints it.
    pub(super) cases: [(&'static str, &'static str); 3],
    pub(super) right: [&'static str; 3],
    pub(super) wrong: [&'static str; 4],
}

pub(super) const PROBLEMS: [Problem; 20] = [
    // The sum of two numbers.
    Problem {
        cases: [("2, 3", "5"), ("-1, 1", "0"), ("10, 0", "10")],
        right: [
            "def f(a, b):\n    return a + b",
            "f = lambda *n: sum(n)",
            "from operator import add as f",
        ],
        wrong: [
            "def f(a, b):\n    return a - b",
            "def f(a, b):\n    return abs(a) + abs(b)",
            "def f(a, b):\n    a + b",
            "def f(a, b):\n    return str(a + b)",
        ],
    },
    // The factorial.
    Problem {
        cases: [("0", "1"), ("5", "120"), ("10", "3628800")],
        right: [
            "def f(n):\n    return 1 if n == 0 else n * f(n - 1)",
            "def f(n):\n    x = 1\n    for i in range(2, n + 1):\n        x *= i\n    return x",
            "from math import factorial as f",
        ],
        wrong: [
            "def f(n):\n    return n * f(n - 1)",
            "def f(n):\n    x = 1\n    for i in range(1, n):\n        x *= i\n    return x",
            "def f(n):\n    return 0 if n == 0 else n * f(n - 1)",
            "def f(n):\n    return sum(range(n + 1))",
        ],
    },
    // The text from its end to its beginning.
    Problem {
        cases: [("'abc'", "'cba'"), ("''", "''"), ("'ab c'", "'c ba'")],
        right: [
            "def f(s):\n    return s[::-1]",
            "def f(s):\n    return ''.join(reversed(s))",
            "def f(s):\n    return s and f(s[1:]) + s[0]",
        ],
        wrong: [
            "def f(s):\n    return s",
            "def f(s):\n    return reversed(s)",
            "def f(s):\n    return s[:0:-1]",
            "def f(s):\n    return ' '.join(reversed(s.split()))",
        ],
    },
    // Whether a text is a palindrome of letters.
    Problem {
        cases: [
            ("'Never odd or even'", "True"),
            ("'ab'", "False"),
            ("'A'", "True"),
        ],
        right: [
            "def f(s):\n    s = [c.lower() for c in s if c.isalpha()]\n    return s == s[::-1]",
            "import re\ndef f(s):\n    s = re.sub('[^a-z]', '', s.lower())\n    return all(s[i] == s[-1 - i] for i in range(len(s)))",
            "def f(s):\n    s = s.replace(' ', '').lower()\n    while len(s) > 1:\n        if s[0] != s[-1]:\n            return False\n        s = s[1:-1]\n    return True",
        ],
        wrong: [
            "def f(s):\n    return s == s[::-1]",
            "def f(s):\n    return s.lower() == s.lower()[::-1]",
            "def f(s):\n    return True",
            "def f(s):\n    s = s.replace(' ', '').lower()\n    return s[0] != s[-1]",
        ],
    },
    // A number of the sequence of Fibonacci.
    Problem {
        cases: [("0", "0"), ("1", "1"), ("30", "832040")],
        right: [
            "def f(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
            "import functools\n@functools.lru_cache(None)\ndef f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)",
            "def f(n):\n    x = [0, 1]\n    while len(x) <= n:\n        x.append(x[-1] + x[-2])\n    return x[n]",
        ],
        wrong: [
            "def f(n):\n    a, b = 1, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
            "def f(n):\n    return n",
            "def f(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a = b\n        b = a + b\n    return a",
            "def f(n):\n    return f(n - 1) + f(n - 2)",
        ],
    },
    // Whether a number is prime.
    Problem {
        cases: [("1", "False"), ("97", "True"), ("91", "False")],
        right: [
            "def f(n):\n    return n > 1 and all(n % d for d in range(2, n))",
            "def f(n):\n    if n < 2:\n        return False\n    d = 2\n    while d * d <= n:\n        if n % d == 0:\n            return False\n        d += 1\n    return True",
            "import re\ndef f(n):\n    return not re.match(r'^.?$|^(..+?)\\1+$', '1' * n)",
        ],
        wrong: [
            "def f(n):\n    return all(n % d for d in range(2, n))",
            "def f(n):\n    return n % 2 == 1",
            "def f(n):\n    return n > 1 and all(n % d for d in (2, 3, 5))",
            "def f(n):\n    return n > 1 and any(n % d for d in range(2, n))",
        ],
    },
    // The number of vowels.
    Problem {
        cases: [("'Education'", "5"), ("'xyz'", "0"), ("'AEIOU'", "5")],
        right: [
            "def f(s):\n    return sum(c in 'aeiouAEIOU' for c in s)",
            "import re\ndef f(s):\n    return len(re.findall('[aeiou]', s, re.I))",
            "def f(s):\n    n = 0\n    for c in s.lower():\n        if c in {'a', 'e', 'i', 'o', 'u'}:\n            n += 1\n    return n",
        ],
        wrong: [
            "def f(s):\n    return sum(c in 'aeiou' for c in s)",
            "def f(s):\n    return len(set(s.lower()) & set('aeiou')) - 1",
            "def f(s):\n    return len(s)",
            "def f(s):\n    return sum(c in 'aeiou' for c in s.upper())",
        ],
    },
    // The largest number of a list, or none.
    Problem {
        cases: [("[3, 9, 2]", "9"), ("[-5, -2]", "-2"), ("[]", "None")],
        right: [
            "def f(x):\n    return max(x) if x else None",
            "def f(x):\n    return max(x, default=None)",
            "def f(x):\n    best = None\n    for n in x:\n        if best is None or n > best:\n            best = n\n    return best",
        ],
        wrong: [
            "f = max",
            "def f(x):\n    best = 0\n    for n in x:\n        best = max(best, n)\n    return best",
            "def f(x):\n    return sorted(x)[0] if x else None",
            "def f(x):\n    return x[-1] if x else None",
        ],
    },
    // The greatest common divisor.
    Problem {
        cases: [("12, 18", "6"), ("7, 5", "1"), ("0, 4", "4")],
        right: [
            "from math import gcd as f",
            "def f(a, b):\n    while b:\n        a, b = b, a % b\n    return a",
            "def f(a, b):\n    return a if b == 0 else f(b, a % b)",
        ],
        wrong: [
            "def f(a, b):\n    return min(a, b)",
            "def f(a, b):\n    while b:\n        a = b\n        b = a % b\n    return a",
            "def f(a, b):\n    return a * b",
            "def f(a, b):\n    return max(d for d in range(1, min(a, b) + 1) if a % d == 0 and b % d == 0)",
        ],
    },
    // A list without its duplicates.
    Problem {
        cases: [
            ("[3, 1, 3, 2, 1]", "[3, 1, 2]"),
            ("[]", "[]"),
            ("['b', 'a']", "['b', 'a']"),
        ],
        right: [
            "def f(x):\n    return list(dict.fromkeys(x))",
            "def f(x):\n    y = []\n    for n in x:\n        if n not in y:\n            y.append(n)\n    return y",
            "def f(x):\n    return [n for i, n in enumerate(x) if n not in x[:i]]",
        ],
        wrong: [
            "def f(x):\n    return sorted(set(x))",
            "def f(x):\n    return x",
            "def f(x):\n    return set(x)",
            "def f(x):\n    return [n for n in x if x.count(n) == 1]",
        ],
    },
    // Words and how often they occur.
    Problem {
        cases: [
            ("'a b a'", "{'a': 2, 'b': 1}"),
            ("''", "{}"),
            ("'x  x'", "{'x': 2}"),
        ],
        right: [
            "from collections import Counter\ndef f(s):\n    return dict(Counter(s.split()))",
            "def f(s):\n    d = {}\n    for w in s.split():\n        d[w] = d.get(w, 0) + 1\n    return d",
            "def f(s):\n    w = s.split()\n    return {k: w.count(k) for k in w}",
        ],
        wrong: [
            "def f(s):\n    w = s.split(' ')\n    return {k: w.count(k) for k in w}",
            "def f(s):\n    return {k: 1 for k in s.split()}",
            "def f(s):\n    return {k: s.count(k) for k in s}",
            "def f(s):\n    return len(s.split())",
        ],
    },
    // All elements of nested lists.
    Problem {
        cases: [
            ("[1, [2, [3]], []]", "[1, 2, 3]"),
            ("[]", "[]"),
            ("[[[1]]]", "[1]"),
        ],
        right: [
            "def f(x):\n    y = []\n    for e in x:\n        y += f(e) if isinstance(e, list) else [e]\n    return y",
            "def f(x):\n    return sum((f(e) if type(e) is list else [e] for e in x), [])",
            "def f(x):\n    todo, y = list(x)[::-1], []\n    while todo:\n        e = todo.pop()\n        if isinstance(e, list):\n            todo += e[::-1]\n        else:\n            y.append(e)\n    return y",
        ],
        wrong: [
            "def f(x):\n    return sum(x, [])",
            "def f(x):\n    return x",
            "def f(x):\n    return [e for e in x if not isinstance(e, list)]",
            "def f(x):\n    y = []\n    for e in x:\n        y += e if isinstance(e, list) else [e]\n    return y",
        ],
    },
    // A number in base 2.
    Problem {
        cases: [("0", "'0'"), ("10", "'1010'"), ("255", "'11111111'")],
        right: [
            "def f(n):\n    return bin(n)[2:]",
            "def f(n):\n    return format(n, 'b')",
            "def f(n):\n    s = ''\n    while n:\n        s = str(n % 2) + s\n        n //= 2\n    return s or '0'",
        ],
        wrong: [
            "def f(n):\n    return bin(n)",
            "def f(n):\n    s = ''\n    while n:\n        s = str(n % 2) + s\n        n //= 2\n    return s",
            "def f(n):\n    s = ''\n    while n:\n        s += str(n % 2)\n        n //= 2\n    return s or '0'",
            "def f(n):\n    return int(bin(n)[2:])",
        ],
    },
    // The sum of the digits.
    Problem {
        cases: [("123", "6"), ("0", "0"), ("-45", "9")],
        right: [
            "def f(n):\n    return sum(map(int, str(abs(n))))",
            "def f(n):\n    n, s = abs(n), 0\n    while n:\n        n, d = divmod(n, 10)\n        s += d\n    return s",
            "def f(n):\n    return f(-n) if n < 0 else n if n < 10 else n % 10 + f(n // 10)",
        ],
        wrong: [
            "def f(n):\n    return sum(map(int, str(n)))",
            "def f(n):\n    return len(str(abs(n)))",
            "def f(n):\n    n, s = abs(n), 0\n    while n > 10:\n        n, d = divmod(n, 10)\n        s += d\n    return s",
            "def f(n):\n    return 1 + (abs(n) - 1) % 9 + 1",
        ],
    },
    // Whether brackets are balanced.
    Problem {
        cases: [("'([]{})'", "True"), ("'([)]'", "False"), ("'(('", "False")],
        right: [
            "def f(s):\n    stack = []\n    for c in s:\n        if c in '([{':\n            stack.append(c)\n        elif not stack or '([{'.index(stack.pop()) != ')]}'.index(c):\n            return False\n    return not stack",
            "def f(s):\n    while True:\n        t = s.replace('()', '').replace('[]', '').replace('{}', '')\n        if t == s:\n            return not s\n        s = t",
            "import re\ndef f(s):\n    n = 1\n    while n:\n        s, n = re.subn(r'\\(\\)|\\[\\]|\\{\\}', '', s)\n    return s == ''",
        ],
        wrong: [
            "def f(s):\n    return s.count('(') == s.count(')') and s.count('[') == s.count(']')",
            "def f(s):\n    return len(s) % 2 == 0",
            "def f(s):\n    stack = []\n    for c in s:\n        if c in '([{':\n            stack.append(c)\n        elif not stack or '([{'.index(stack.pop()) != ')]}'.index(c):\n            return False\n    return True",
            "def f(s):\n    return s == s[::-1]",
        ],
    },
    // The transposed matrix.
    Problem {
        cases: [
            ("[[1, 2], [3, 4]]", "[[1, 3], [2, 4]]"),
            ("[[1, 2, 3]]", "[[1], [2], [3]]"),
            ("[]", "[]"),
        ],
        right: [
            "def f(m):\n    return [list(r) for r in zip(*m)]",
            "def f(m):\n    return [[r[i] for r in m] for i in range(len(m[0]))] if m else []",
            "def f(m):\n    return list(map(list, zip(*m)))",
        ],
        wrong: [
            "def f(m):\n    return list(zip(*m))",
            "def f(m):\n    return [r[::-1] for r in m]",
            "def f(m):\n    return [[r[i] for r in m] for i in range(len(m))]",
            "def f(m):\n    return [[r[i] for r in m] for i in range(len(m[0]))]",
        ],
    },
    // The place of a number in a sorted list, or -1.
    Problem {
        cases: [
            ("[1, 3, 5, 7], 5", "2"),
            ("[1, 3], 2", "-1"),
            ("[], 1", "-1"),
        ],
        right: [
            "def f(x, n):\n    return x.index(n) if n in x else -1",
            "def f(x, n):\n    a, b = 0, len(x)\n    while a < b:\n        m = (a + b) // 2\n        if x[m] < n:\n            a = m + 1\n        else:\n            b = m\n    return a if a < len(x) and x[a] == n else -1",
            "from bisect import bisect_left\ndef f(x, n):\n    i = bisect_left(x, n)\n    return i if x[i:i + 1] == [n] else -1",
        ],
        wrong: [
            "def f(x, n):\n    return x.index(n)",
            "from bisect import bisect_left as f",
            "def f(x, n):\n    return n in x",
            "def f(x, n):\n    return x.index(n) + 1 if n in x else -1",
        ],
    },
    // A Roman numeral.
    Problem {
        cases: [("1994", "'MCMXCIV'"), ("4", "'IV'"), ("58", "'LVIII'")],
        right: [
            "def f(n):\n    s = ''\n    for v, r in zip((1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1), 'M CM D CD C XC L XL X IX V IV I'.split()):\n        while n >= v:\n            s += r\n            n -= v\n    return s",
            "def f(n):\n    s = 'I' * n\n    for a, b in (('IIIII', 'V'), ('IIII', 'IV'), ('VV', 'X'), ('VIV', 'IX'), ('XXXXX', 'L'), ('XXXX', 'XL'), ('LL', 'C'), ('LXL', 'XC'), ('CCCCC', 'D'), ('CCCC', 'CD'), ('DD', 'M'), ('DCD', 'CM')):\n        s = s.replace(a, b)\n    return s",
            "def f(n):\n    d = lambda k, a, b, c: ['', a, a * 2, a * 3, a + b, b, b + a, b + a * 2, b + a * 3, a + c][n // k % 10]\n    return 'M' * (n // 1000) + d(100, 'C', 'D', 'M') + d(10, 'X', 'L', 'C') + d(1, 'I', 'V', 'X')",
        ],
        wrong: [
            "def f(n):\n    s = ''\n    for v, r in zip((1000, 500, 100, 50, 10, 5, 1), 'MDCLXVI'):\n        while n >= v:\n            s += r\n            n -= v\n    return s",
            "def f(n):\n    return 'I' * n",
            "def f(n):\n    return {4: 'IV', 58: 'LVIII'}[n]",
            "def f(n):\n    return 'mcmxciv'",
        ],
    },
    // The number of steps of Collatz to 1.
    Problem {
        cases: [("1", "0"), ("6", "8"), ("27", "111")],
        right: [
            "def f(n):\n    k = 0\n    while n != 1:\n        n = n // 2 if n % 2 == 0 else 3 * n + 1\n        k += 1\n    return k",
            "def f(n):\n    return 0 if n == 1 else 1 + f(3 * n + 1 if n % 2 else n // 2)",
            "def f(n):\n    seen = [n]\n    while seen[-1] > 1:\n        seen.append([seen[-1] // 2, 3 * seen[-1] + 1][seen[-1] % 2])\n    return len(seen) - 1",
        ],
        wrong: [
            "def f(n):\n    k = 1\n    while n != 1:\n        n = n // 2 if n % 2 == 0 else 3 * n + 1\n        k += 1\n    return k",
            "def f(n):\n    return n.bit_length() - 1",
            "def f(n):\n    return 0 if n == 1 else 1 + f(n // 2)",
            "def f(n):\n    k = 0\n    while n != 1:\n        n = n / 2 if n % 2 else 3 * n + 1\n        k += 1\n        if k > 1000:\n            return None\n    return k",
        ],
    },
    // The distance of Hamming between texts of the same length, or an exception's name.
    Problem {
        cases: [
            ("'abc', 'abd'", "1"),
            ("'', ''", "0"),
            ("'a', ''", "'ValueError'"),
        ],
        right: [
            "def f(a, b):\n    return sum(x != y for x, y in zip(a, b)) if len(a) == len(b) else 'ValueError'",
            "def f(a, b):\n    if len(a) != len(b):\n        return ValueError.__name__\n    n = 0\n    for i in range(len(a)):\n        n += a[i] != b[i]\n    return n",
            "def f(a, b):\n    try:\n        if len(a) - len(b):\n            raise ValueError\n        return len([1 for x, y in zip(a, b) if x != y])\n    except ValueError as error:\n        return type(error).__name__",
        ],
        wrong: [
            "def f(a, b):\n    return sum(x != y for x, y in zip(a, b))",
            "def f(a, b):\n    if len(a) != len(b):\n        raise ValueError\n    return sum(x != y for x, y in zip(a, b))",
            "def f(a, b):\n    return len(set(a) - set(b)) + len(set(b) - set(a)) if len(a) == len(b) else 'ValueError'",
            "def f(a, b):\n    return int(a != b)",
        ],
    },
];
