"""Pairs of an expected answer and a completion, made from the word problems of GSM8K and SVAMP in 20 ways of writing an answer.

The answer of a completion is known, so it is known whether the pair is equal: half of them are. A wrong completion also has the expected
number in another place, and a right one has wrong numbers there.
"""

import json
import random
import re
from fractions import Fraction
from pathlib import Path


def problems(data):
    """Returns (numbers of the solution, text of the solution, answer) of the problems whose answer is a whole number."""
    found = []
    for line in (Path(data) / "gsm8k/test.jsonl").read_text().splitlines():
        solution, _, answer = json.loads(line)["answer"].rpartition("####")
        solution = re.sub(r"<<[^>]*>>", "", solution).strip()
        answer = Fraction(answer.strip().replace(",", ""))
        found.append((solution, answer))
    for row in json.loads((Path(data) / "svamp/SVAMP.json").read_text()):
        equation = re.sub(r"\.0\b", "", row["Equation"])
        found.append((f"{row['Body']}. So I compute {equation}.", Fraction(str(row["Answer"]))))
    found = [(text, int(answer)) for text, answer in found if answer.denominator == 1 and answer > 0]
    return [([int(x) for x in re.findall(r"\b[1-9][0-9]{0,5}\b", text)], text, answer) for text, answer in found]


class Draw:
    """One pair: its answer, what the completion states, and numbers that are beside it."""

    def __init__(self, generator, problem, right):
        self.random = generator
        self.numbers, self.solution, self.answer = problem
        self.right = right
        self.settle(self.answer)

    def settle(self, answer):
        """Sets the expected answer, the stated one and the decoy."""
        self.answer = answer
        wrong = self.wrong(answer)
        self.stated, self.decoy = (answer, wrong) if self.right else (wrong, answer)

    def wrong(self, answer):
        others = [answer + 1, answer - 1, answer * 10, answer * 2, answer + 10, int(str(answer)[::-1]), *self.numbers]
        return self.pick([other for other in others if other > 0 and other != answer])

    def pick(self, options):
        return self.random.choice(options)

    def say(self, *templates, **values):
        values = {"v": self.stated, "d": self.decoy, "solution": self.solution, **values}
        text = self.pick(templates)
        for key, value in values.items():
            text = text.replace(f"<{key}>", str(value))
        return text


def box(text):
    return "\\boxed{" + text + "}"


def grouped(number, separator, decimals=""):
    return f"{number:,}".replace(",", separator) + decimals


def large(draw):
    """Makes an answer with separators of thousands. A wrong one differs in the digits before or after one, or in their number."""
    answer = draw.answer
    while answer < 1000:
        answer = answer * 37 + draw.random.randrange(1000)
    others = [answer + 1, answer + 1000, answer * 10, answer * 1000, answer // 1000, answer % 1000 + 1]
    wrong = draw.pick([other for other in others if other != answer])
    draw.answer = answer
    draw.stated, draw.decoy = (answer, wrong) if draw.right else (wrong, answer)


def boxed(draw):
    return draw.answer, draw.say(
        "<solution>\n" + box("<v>"),
        "I first get <d>. So the result is $" + box("<v>") + "$.",
        "<solution>\n\n$$" + box("<v>") + "$$",
        "From <d> follows \\(" + box(" <v> ") + "\\).",
        "The result of step 2 is <d>.\nFinal: \\[" + box("<v>.") + "\\]",
        box("<v>") + "\nI checked it with 3 other numbers, such as <d>.",
    )


def marked(draw):
    return draw.answer, draw.say(
        "<solution>\n#### <v>",
        "There are <d> first.\n####<v>",
        "#### <v>\n",
        "There are <d> at the start.\n#### <v>.",
        "<solution>\n#### $<v>",
        "<solution>\n#### <v> apples",
        "There are <d>.\n\n#### **<v>**",
        "#### Step 1\nThere are <d>.\n#### <v>",
        "<solution>\n#### Answer: <v>",
    )


def bold(draw):
    return draw.answer, draw.say(
        "<solution>\nThe answer is **<v>**.",
        "<solution>\n**<v>**",
        "I start from <d>.\n\n**Answer: <v>**",
        "I start from **<d>**.\n\n**Answer:** <v>",
        "I start from <d>.\n\n**Final answer:** **<v>**",
        "First **<d>**, so in the end there are **<v>**.",
        "<solution>\n__<v>__",
        "First **<d>** apples.\nIn total **<v> apples**.",
        "### Final Answer\n**<v>**",
    )


def phrase(draw):
    return draw.answer, draw.say(
        "<solution>\nThe answer is <v>.",
        "<solution>\nThe answer is <v>",
        "First there are <d>. The final answer is <v>. I hope it is correct.",
        "First there are <d>.\nAnswer: <v>",
        "First there are <d>.\nFinal answer: <v>",
        "First there are <d>.\n\nThe answer is: $<v>$.",
        "First there are <d>. Therefore, the answer is $<v>$ apples.",
        "ANSWER: <v>",
        "The answer is <v>, because <d> is too much or too little.",
        "The correct answer is <v> rather than <d>.",
        "So the total is <v>.",
        "She has <v> apples left.",
        "In the end <v> apples remain.",
    )


def fraction(draw):
    divisor = draw.pick([3, 7, 9, 11, 13])
    if draw.answer % divisor == 0:
        draw.settle(draw.answer + 1)
    answer, stated, decoy = (Fraction(x, divisor) for x in (draw.answer, draw.stated, draw.decoy))
    latex = lambda x, name="frac": f"\\{name}{{{x.numerator}}}{{{x.denominator}}}"
    expected = draw.pick([f"{answer.numerator}/{answer.denominator}", f"${latex(answer)}$"])
    whole, rest = divmod(stated.numerator, stated.denominator)
    mixed = f"{whole}\\frac{{{rest}}}{{{stated.denominator}}}" if whole and rest else latex(stated)
    factor = draw.pick([2, 3, 10])
    return expected, draw.say(
        "The answer is $" + latex(stated) + "$.",
        "First $" + latex(decoy) + "$ is used. So $" + box(latex(stated, "dfrac")) + "$.",
        "First it is " + latex(decoy) + ". " + box(mixed),
        f"First it is {decoy}. The answer is {stated.numerator}/{stated.denominator}.",
        f"First it is {decoy}.\n#### {stated}",
        "$x = " + latex(stated, "tfrac") + "$",
        box(f"\\frac{{{stated.numerator * factor}}}{{{stated.denominator * factor}}}"),
        f"\\[ \\frac{{{stated.numerator}}}{{{stated.denominator}}} \\]",
        box(f"-\\frac{{-{stated.numerator}}}{{{stated.denominator}}}"),
    )


def percent(draw):
    draw.settle(draw.answer % 97 + 1)
    if draw.stated == 100 * draw.answer:
        # 500% is 5.
        draw.stated = draw.answer + 1
    expected = draw.pick([f"{draw.answer}%", f"{draw.answer}\\%", f"{draw.answer}"])
    return expected, draw.say(
        "The answer is <v>%.",
        "First <d>% are left. " + box("<v>\\%"),
        "First <d>% are left. $" + box("<v>") + "\\%$",
        "<solution>\n#### <v>%",
        "Not <d> percent: the answer is <v> percent.",
        "It grows by $<v>\\%$.",
        "It grows by **<v>%**.",
        "The share is <v> %.",
        box("<v>\\text{ percent}"),
        "Answer: <v> percent of the <d> apples",
    )


def thousands(draw):
    large(draw)
    v, d = draw.stated, draw.decoy
    return draw.pick([draw.answer, grouped(draw.answer, ",")]), draw.say(
        f"First {grouped(d, ',')}. The answer is {grouped(v, ',')}.",
        f"First {d}. " + box(grouped(v, ",")),
        f"First {d}. $" + box(grouped(v, "{,}")) + "$",
        f"First {d}.\n#### {grouped(v, ',')}",
        f"First {d}. The total is **{grouped(v, ',')}**.",
        f"It is ${grouped(v, ',')}$ in total.",
        f"Answer: {grouped(v, ',')}.00",
        f"First {d}. " + box(grouped(v, ",\\!")),
        f"First {d}. She pays ${grouped(v, ',')}.00 in total.",
        f"First {grouped(d, ',')}, then {grouped(v, ',')}",
    )


def european(draw):
    large(draw)
    v, d = draw.stated, draw.decoy
    decimals = ",00"
    if not draw.right and draw.random.random() < 0.3:
        v, d, decimals = draw.answer, draw.answer, ",50"
    return draw.pick([draw.answer, f"{draw.answer}.0"]), draw.say(
        f"First {d}. The answer is {grouped(v, '.', decimals)}.",
        f"First {d}. " + box(grouped(v, ".", decimals)),
        f"First {d}.\n#### {grouped(v, '.', decimals)}",
        f"First {d}. Answer: **{grouped(v, '.', decimals)}** €",
        f"First {d}. She pays {grouped(v, '.', decimals)} €.",
        f"First {d}. She pays € {v}{decimals}",
        f"First {d}. The answer is {grouped(v, ' ', decimals)}.",
        f"First {d}. $" + box(grouped(v, "\\,", decimals.replace(",", "{,}"))) + "$",
        f"First {d}. $" + box(f"{v}{decimals.replace(',', '{,}')}") + "$",
    )


UNITS = ["km", "apples", "hours", "km/h", "m^2", "kg", "cookies per day", "dollars", "square meters", "cm", "minutes", "miles per hour"]


def unit(draw):
    return draw.answer, draw.say(
        "The answer is <v> <unit>.",
        "First <d> <unit>. " + box("<v> <unit>"),
        "<solution>\n#### <v> <unit>",
        "First <d> <unit>.\nAnswer: <v> <unit>",
        "First <d> <unit>. So she has **<v> <unit>**.",
        "In total there are <v> <unit> left.",
        "It takes her <v> <unit> instead of the usual ones.",
        "The answer is <v> <unit> in 1 week.",
        unit=draw.pick(UNITS),
    )


def text_unit(draw):
    return draw.answer, draw.say(
        box("<v> \\text{ <unit>}"),
        "First <d>. $" + box("<v>\\,\\text{<unit>}") + "$",
        "First <d>. $" + box("<v>\\ \\mathrm{km}") + "$",
        "First <d>. " + box("<v>\\text{ m}^2"),
        "First <d>. The answer is $<v> \\text{ <unit>}$.",
        "\\[ <v> \\text{ <unit>} \\]",
        box("<v>~\\mathrm{cm}^{3}"),
        box("\\text{<v> <unit>}"),
        "First <d>. $" + box("<v>\\, \\frac{\\text{km}}{\\text{h}}") + "$",
        box("<v>\\text{ <unit> per day}"),
        unit=draw.pick(["apples", "hours", "cookies", "dollars", "people"]),
    )


def currency(draw):
    cents = draw.pick(["", ".00"])
    return draw.answer, draw.say(
        f"The answer is $<v>{cents}.",
        "First $<d>. " + box("\\$<v>" + cents),
        f"First $<d>.\n#### $<v>{cents}",
        f"First €<d>. The answer is €<v>{cents}.",
        f"First €<d>. The answer is <v>{cents} €.",
        f"First £<d>. She pays **£<v>{cents}**.",
        f"First USD <d>. The answer is USD <v>{cents}.",
        f"She had $<d>, and now she has $<v>{cents}.",
        f"She had $<d>, and now she has $<v>{cents} left.",
        "First <d>. $" + box("\\$<v>" + cents) + "$",
        f"Answer: \\$<v>{cents}",
        f"Answer: <v>{cents} USD",
    )


def equation(draw):
    part = draw.random.randrange(1, draw.stated) if draw.stated > 1 else 0
    return draw.answer, draw.say(
        "$x = <v>$",
        "First $x > <d> - 1$. So x = <v>.",
        "First <d>. $" + box("x = <v>") + "$",
        "<a> + <b> = <v>",
        "First <d>. $<a> + <b> = " + box("<v>") + "$",
        "First <d>. $$<a> + <b> = <v>$$",
        "First <d>. The total is <a> + <b> = <v>.",
        "First <d>. The total is <a> + <b> = $<v>.",
        "First <d>. \\(N = <v>\\)",
        "First <d>. Total = <v>",
        "First <d>. Total = <a> + <b> = <v> apples.",
        "First <d>. The answer is <a> + <b> = <v>.",
        "First <d>. Answer: x = <v>",
        "First <d>. $" + box("\\text{total} = <v>") + "$",
        a=part,
        b=draw.stated - part,
    )


def listed(draw):
    second = draw.pick([x for x in [*draw.numbers, draw.answer + 7] if x not in (draw.answer, draw.stated, draw.decoy)])
    values = [draw.stated, second]
    if not draw.right:
        values = draw.pick([values, [draw.answer], [draw.answer, second, draw.decoy + 3 + second]])
    draw.random.shuffle(values)
    comma, words = ", ".join(map(str, values)), " and ".join(map(str, values))
    expected = f"{draw.answer}, {second}"
    if not draw.right and len(values) == 2 and draw.random.random() < 0.5:
        # One of two answers.
        expected = str(values[0])
    return expected, draw.say(
        box(comma),
        "First $<d>$ is tried. $" + box(f"\\{{{comma}\\}}") + "$",
        f"The answers are {words}.",
        f"The answer is {words}.",
        f"The answer is {comma}.",
        "$x = " + "$ or $x = ".join(map(str, values)) + "$",
        box(f"x = {comma}"),
        f"#### {comma}",
        "The answer is $" + "$ and $".join(map(str, values)) + "$.",
        " and ".join(box(str(value)) for value in values),
    )


def interval(draw):
    start, end = draw.answer, draw.answer + draw.random.randrange(2, 50)
    brackets = draw.pick(["[]", "[)", "(]", "()"])
    expected = f"${brackets[0]}{start}, {end}{brackets[1]}$"
    low, high, kind = start, end, brackets
    if not draw.right:
        low, high, kind = draw.pick(
            [
                (start, end, draw.pick([other for other in ["[]", "[)", "(]"] if other != brackets])),
                (start + 1, end, brackets),
                (start, end + 1, brackets),
                (end, end + start, brackets),
            ]
        )
    written = f"{kind[0]}{low}, {high}{kind[1]}"
    signs = ["<" if bracket in "()" else "\\le" for bracket in kind]
    return expected, draw.say(
        "$" + box(written) + "$",
        box(f"\\left{kind[0]}{low}, {high}\\right{kind[1]}"),
        f"So $x \\in {written}$.",
        f"The answer is ${written}$.",
        "$" + box(f"{low} {signs[0]} x {signs[1]} {high}") + "$",
        f"First $[{start + 3}, {end + 3}]$ is tried. The answer is $x \\in {written}$.",
    )


def text_after(draw):
    return draw.answer, draw.say(
        "The answer is <v>.\n- <n> of them are red\n- <d> was tried first",
        "The answer is <v>\n\n1. <n> are red.\n2. <d> are not.",
        "The answer is <v>. Checked on 2024-05-01.",
        "The answer is <v> (<d> was a first guess).",
        "The answer is <v>.\nThe question was asked on 12/31/2023.",
        "Answer: <v>\n\nNote: <d> would be wrong by 1.",
        box("<v>") + "\n\n- <d> red ones\n- <n> blue ones",
        "#### <v>\nThis was problem <d>.",
        "The answer is <v>, as <n> + 1 = <m>.",
        "The answer is $<v>$.\n* <d> is the number of the first day.",
        "Answer: <v>\nConfidence: 95%",
        "The answer is <v> [1].\n[1] page <d>",
        "**Answer: <v>**\n\n---\n\nDate: 2024-05-01",
        n=3,
        m=4,
    )


def earlier_box(draw):
    return draw.answer, draw.say(
        "The first step gives " + box("<d>") + ".\nThe second step gives " + box("<v>") + ".",
        "$" + box("<d>") + "$ apples in the morning.\n\n$" + box("<v>") + "$ apples in total.",
        "Morning: " + box("<d>") + "\n\nTotal: " + box("<v>"),
        "I had " + box("<d>") + ". The answer is <v>.",
        "I had " + box("<d>") + ", then " + box("3") + " more were bought, so it is " + box("<v>"),
        "**Step 1**: " + box("<d>") + "\n**Step 2**: " + box("<v>"),
        "A box such as " + box("<d>") + " has the answer. Mine is " + box("<v>") + ".",
        "The answer is <d>? No. " + box("<v>"),
    )


def correction(draw):
    return draw.answer, draw.say(
        "The answer is <d>. Wait, that is wrong. The answer is <v>.",
        box("<d>") + "\nWait, that is wrong.\n" + box("<v>"),
        "The answer is <d>.\n\nHmm, I forgot one. The answer is <v>.",
        box("<d>") + "\nWait, " + box("<v>"),
        box("<d>") + ". Actually, the answer is <v>.",
        box("<d>") + ", no, " + box("<v>"),
        box("<d>") + " - sorry, " + box("<v>"),
        "#### <d>\nWait, I forgot one.\n#### <v>",
        "Answer: <d>\nLet me check again.\nAnswer: <v>",
        "The answer is <d>. Wait. " + box("<v>"),
        "The answer is not <d>. The answer is <v>.",
        "I thought that the answer is <d>, but the final answer is <v>.",
        "The answer is <d>, no, the answer is <v>.",
        box("<d>") + "\n\nCorrection: " + box("<v>"),
    )


def punctuation(draw):
    if draw.random.random() < 0.4:
        sign = draw.pick(["-", "−"])
        expected, stated = f"-{draw.answer}", f"{sign}{draw.stated}"
        if not draw.right:
            stated = draw.pick([f"{draw.answer}", stated])
    else:
        expected, stated = f"{draw.answer}", f"{draw.stated}"
    return expected, draw.say(
        "<w>.",
        "<w>",
        " <w>\n",
        '"<w>"',
        "(<w>)",
        "`<w>`",
        "First <d>. The answer is '<w>'.",
        "First <d>. The answer is <w>!",
        "First <d>. The answer is: <w>;",
        "First <d>. The answer is <w> .",
        "First <d>. The answer is:\n\n<w>",
        "First <d>. The answer is:\n\n**<w>**",
        "First <d>. The answer is <w>, of course.",
        "First <d>. The answer is <w>...",
        "First <d>. The answer is _<w>_.",
        "First <d>.\nAnswer - <w>",
        "First <d>. The answer is ≈ <w>",
        "First <d>. " + box("<w>."),
        box("{<w>}"),
        w=stated,
        d=f"-{draw.decoy}" if expected.startswith("-") else draw.decoy,
    )


def display(draw):
    part = draw.random.randrange(1, draw.stated) if draw.stated > 1 else 0
    return draw.answer, draw.say(
        "First <d>.\n\\[\n<v>\n\\]",
        "First <d>.\n$$\n<a> + <b> = <v>\n$$",
        "First <d>.\n\\begin{align*}\nx &= <a> + <b> \\\\\n&= <v>\n\\end{align*}",
        "First <d>.\n\\[\n\\begin{aligned}\nx &= <a> + <b> \\\\\n&= <v>\n\\end{aligned}\n\\]",
        "First <d>.\n\\[ x = " + box("<v>") + " \\]",
        "$<d>$ is first.\nSo $<a> + <b> = <v>$ apples.",
        "$<a>$ and $<b>$ make $<v>$.",
        "First <d>.\n\\[\nx = <a> + <b> = <v>.\n\\]\n",
        "$\\text{Total} = <a> + <b> = <v>$",
        "$\\displaystyle <v>$",
        a=part,
        b=draw.stated - part,
    )


def scientific(draw):
    digits = str(draw.stated)
    power = len(digits) - 1
    mantissa = f"{digits[0]}.{digits[1:]}" if power else digits
    return draw.answer, draw.say(
        f"The answer is ${mantissa} \\times 10^{power}$.",
        "First <d>. $" + box(f"{mantissa} \\cdot 10^{{{power}}}") + "$",
        f"First <d>.\n#### {mantissa}e{power}",
        f"First <d>. The answer is {mantissa}e{power}.",
        f"First <d>. The answer is {mantissa}E+{power}.",
        f"First <d>. The answer is {mantissa} × 10^{power}.",
        f"First <d>. Answer: {mantissa} * 10^{power}",
        f"First <d>. {box(f'{mantissa}e{power}')}",
        f"The answer is <v>.{'0' * draw.random.randrange(1, 3)}",
        "First <d>. $" + box(f"\\sqrt{{{draw.stated**2}}}") + "$",
        f"It is {mantissa} x 10^{power}.",
    )


WAYS = [
    boxed, marked, bold, phrase, fraction, percent, thousands, european, unit, text_unit, currency, equation, listed, interval,
    text_after, earlier_box, correction, punctuation, display, scientific,
]  # fmt: skip


def pairs(data, count, seed):
    """Returns (way, expected answer, completion, whether they are equal) of `count` pairs."""
    rows = problems(data)
    generator = random.Random(seed)
    for number in range(count):
        way = WAYS[number % len(WAYS)]
        draw = Draw(generator, generator.choice(rows), number // len(WAYS) % 2 == 0)
        expected, completion = way(draw)
        yield way.__name__, str(expected), completion, draw.right
