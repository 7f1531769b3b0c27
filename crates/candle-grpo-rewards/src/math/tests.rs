//! Tests that combine parsing and comparison.

use std::time::Instant;

use candle_grpo_test_support::WATCHDOG;
use num_rational::BigRational;
use proptest::prelude::*;
use rstest::rstest;
use serde_json::json;

use super::compare::Comparison;
use super::parser::parse;
use super::value::Value;
use super::{AnswerPlace, MathReward};

fn matches(answer: &str, reference: &str) -> bool {
    let reward = MathReward::default();
    reward
        .matches(answer, &json!({"answer": reference}))
        .unwrap()
}

#[rstest]
// Numbers.
#[case("42", "42.0")]
#[case("1,200", "1200")]
#[case("1 000", "1000")]
#[case(r"14{,}916", "14916")]
#[case(r"10,\!000", "10000")]
#[case("2,74", "2.74")]
#[case("007", "7")]
#[case("-5", "−5")]
#[case("1.5e3", "1500")]
#[case("0.3333333", r"\frac13")]
#[case(r"2\frac{1}{3}", r"\frac{7}{3}")]
#[case(r"\frac34", "0.75")]
#[case(r"\frac 3 4", "3/4")]
#[case(r"\dfrac{-1}{2}", "-1/2")]
#[case(r"\text{13}", "13")]
#[case("5!", "120")]
#[case(r"\binom{5}{2}", "10")]
#[case("2^{10}", "1024")]
#[case(r"1112_3", "1112_{3}")]
// Percentages.
#[case("28%", r"28\%")]
#[case("28 percent", "0.28")]
#[case("28", r"28\%")]
#[case("-5%", "-5")]
#[case(r"$\boxed{28}$ percent", "28%")]
// Roots.
#[case(r"\sqrt{12}", r"2\sqrt3")]
#[case(r"\frac{1}{\sqrt2}", r"\frac{\sqrt{2}}{2}")]
#[case(r"\frac{1}{\sqrt{2}+1}", r"\sqrt{2}-1")]
#[case(r"\sqrt[3]{-8}", "-2")]
#[case(r"\sqrt[3]{16}", r"2\sqrt[3]{2}")]
#[case(r"\sqrt{6}", r"\sqrt{2}\sqrt{3}")]
#[case(r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}")]
#[case(r"\sqrt{-4}", "2i")]
#[case("i^2", "-1")]
#[case("i^3", "-i")]
#[case("√2/2", r"\frac{1}{\sqrt 2}")]
// Expressions.
#[case("(x+1)^2", "x^2+2x+1")]
#[case(r"\frac{x^2-1}{x-1}", "x+1")]
#[case(r"\frac{x+2}{7}", r"\frac{x}{7}+\frac{2}{7}")]
#[case("x**2", "x^2")]
#[case("2^{x+1}", r"2 \cdot 2^x")]
#[case("4^x", "2^{2x}")]
#[case("e^{2x}", "(e^x)^2")]
#[case(r"\ln 8", r"3 \ln 2")]
#[case(r"\log_2 8", "3")]
#[case(r"\tan x", r"\frac{\sin x}{\cos x}")]
#[case(r"\sin^2 x", r"1-\cos^2 x")]
#[case(r"\sin(-x)", r"-\sin x")]
#[case(r"\cos\frac{\pi}{3}", "1/2")]
#[case(r"|-3|", "3")]
#[case(r"2\pi r", r"r \cdot 2\pi")]
#[case(r"\pi", "π")]
#[case(r"\lfloor 7/2 \rfloor", "3")]
// Tuples, sets, intervals.
#[case("(1, 2)", r"\left(1, \frac{4}{2}\right)")]
#[case(r"\{1, 2\}", r"\{2, 1\}")]
#[case("1, 2", "2 and 1")]
#[case(r"x = 1 \text{ or } x = 2", "1, 2")]
#[case(r"1 \pm \sqrt2", r"1-\sqrt2, 1+\sqrt2")]
#[case("(1,2),(3,4)", "(3,4),(1,2)")]
#[case("[-36,104]", r"\left[-36, 104\right]")]
#[case(r"(-\infty, 2)", "x < 2")]
#[case(r"[0, \infty)", r"x \ge 0")]
#[case("2 < x \\le 3", "(2, 3]")]
#[case(r"x \in (2, 3)", "2 < x < 3")]
#[case(r"[0,1) \cup (2,3]", r"(2,3] \cup [0,1)")]
#[case(r"1 \le |x| \le 2", r"[-2,-1] \cup [1,2]")]
#[case(r"\emptyset", r"\{\}")]
// Matrices.
#[case(
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
    r"\begin{bmatrix}1&2\\3&\frac{8}{2}\end{bmatrix}"
)]
#[case(
    r"\begin{pmatrix}1&1\\0&1\end{pmatrix}^2",
    r"\begin{pmatrix}1&2\\0&1\end{pmatrix}"
)]
// Equations and inequalities.
#[case("x = 5", "5")]
#[case("x = 2 + 3 = 5", "5")]
#[case("2x + 4y = 6", "y = 3/2 - x/2")]
#[case("x < 1", "-x > -1")]
#[case(r"x \neq 3", "3 \\ne x")]
#[case("(p, q) = (3, 2)", "(3,2)")]
#[case("f(x) = x^2", "x^2")]
// Units and text.
#[case(r"5\text{ cm}^2", "5")]
#[case("35 cm", "35")]
#[case("$12", "12 dollars")]
#[case(r"90^\circ", "90")]
#[case(r"\text{(C)}", "C")]
#[case(r"\text{Evelyn}", "Evelyn")]
// Places.
#[case("so 1 and 2.\nThe answer is $x^2$. Good.", "x^2")]
#[case(r"\boxed{1} and \boxed{2}", "2, 1")]
#[case("The sum is 7.", "7")]
#[case("6 * 7 = 42\n#### 42", "42")]
// A list or a decimal comma.
#[case(r"\boxed{2,3}", "2,3")]
#[case(r"\boxed{3,2}", "2,3")]
#[case("$2$ and $3$", "2,3")]
#[case(r"\boxed{1500}", "1,500")]
#[case(r"\boxed{4,3,2}", "2,3,4")]
#[case("The total is 2,74.", "2.74")]
#[case(r"\boxed{-2,3}", "-2,3")]
#[case(r"\boxed{3,-2}", "-2,3")]
#[case(r"\boxed{-3, 2}", "2,-3")]
#[case("The answers are $x=2$ and $x=3$", "2,3")]
#[case("$2,3$", "2,3")]
#[case(r"\boxed{2,3}", "2, 3")]
#[case("2,3", "2,3")]
#[case(r"\boxed{12,34}", "12,34")]
#[case(r"\boxed{34,12}", "12,34")]
#[case("1500", "1,500")]
#[case("The total is 1,500.", "1,500")]
// Short words.
#[case("It is 42", "42")]
#[case("So: 42", "42")]
#[case("A: 42", "42")]
#[case("x is 42", "42")]
#[case("That is 42", "42")]
#[case("x + y", "x+y")]
#[case("y = 42", "42")]
#[case("x = 42", "x = 42")]
#[case("I get 42", "42")]
#[case("2x", "2x")]
#[case("ab", "ab")]
#[case("OK, 42", "42")]
#[case("We do it: 42", "42")]
#[case("So it is 42", "42")]
#[case("x^2 + 1", "x^2+1")]
#[case("Q: 42", "42")]
#[case("2 a b", "2ab")]
#[case("Oh, 42", "42")]
#[case("Ah, 42!", "42")]
#[case("At 42", "42")]
#[case("be 42", "42")]
#[case("a: 42", "42")]
#[case("I do, 42", "42")]
#[case("I'd go 42", "42")]
#[case("at^2", "at^2")]
#[case("ah/2", "ah/2")]
#[case("=> 42", "42")]
#[case("-> 42", "42")]
#[case("→ -42", "-42")]
#[case("∴ 42", "42")]
#[case(r"$\Rightarrow x = 42$", "42")]
#[case(r"\boxed{\therefore 42}", "42")]
// Texts between numbers.
#[case(
    r"\boxed{3 \text{ hours } 20 \text{ minutes}}",
    r"3 \text{ hours } 20 \text{ minutes}"
)]
#[case(r"\boxed{\frac{3}{4}}", r"\frac{3}{4} \text{ cup}")]
#[case(r"\boxed{15}", r"15 \text{ cm}")]
#[case(r"$\frac{3}{4}$", r"\frac{3}{4} \text{ cup}")]
#[case(r"\boxed{2}", r"2\text{ m} ")]
#[case(r"\boxed{3,2}", r"x=2 \text{ or } x=3")]
#[case(
    r"\boxed{3 \text{ hours } 20 \text{ minutes}}",
    r"3\text{ hours }20\text{ minutes}"
)]
// Text after the number.
#[case("The answer is 42\n- 3 of them are red", "42")]
#[case("The answer is 42 - 3", "39")]
#[case("The answer is 42.\n- 5 more", "42")]
#[case("The answer is 42\n* 3 of them", "42")]
#[case("The answer is 42\n-----\n2. Next", "42")]
#[case("The answer is 42 (4 + 38)", "42")]
#[case("The answer is 4 + 38", "42")]
#[case("42 - 39", "3")]
#[case("The answer is (2+4)", "6")]
#[case("The answer is -3", "-3")]
// Marks of Markdown.
#[case("#### **42**", "42")]
#[case("#### *42*", "42")]
#[case("#### `42`", "42")]
#[case("#### **42.**", "42")]
#[case("#### **1/2**", "1/2")]
#[case("####**42**", "42")]
#[case("#### 2*3", "6")]
#[case("#### Final Answer\n42", "42")]
#[case("#### Final Answer\n\n**42**", "42")]
#[case("#### Step 2: add 3 and 4\nThe answer is 42.", "42")]
#[case("#### 42\n####", "42")]
#[case("#### $**42**$", "42")]
#[case("#### ~~41~~ 42", "42")]
// Escaped braces.
#[case(
    r"$\boxed{f(x)=\left\{\begin{array}{l} 1 \\ 2 \end{array}\right.}$",
    r"f(x)=\left\{\begin{array}{l} 1 \\ 2 \end{array}\right."
)]
#[case(r"\boxed{\left\{3\right\}}", "3")]
#[case(r"\boxed{\{1,2\}}", r"\{1,2\}")]
#[case(r"\boxed{\left\{1,2\right\}}", r"\{1,2\}")]
// A list after the answer, and a remark after a dash.
#[case("The answer is 42\n- x = 6\n- y = 7", "42")]
#[case("The answer is 42\n* n is even", "42")]
#[case("The answer is 42\n+ x is odd", "42")]
#[case("The answer is 42 — 6 times 7.", "42")]
// Boxes that are corrected.
#[case("\\boxed{7}\nWait, \\boxed{8}", "8")]
#[case(r"\boxed{7}, \boxed{8}", "7, 8")]
#[case("\\boxed{7}\nHmm, no, \\boxed{8}", "8")]
#[case("\\boxed{7}\nWait, \\boxed 8", "8")]
#[case("\\boxed{7}\nWait, $\\boxed 8$.", "8")]
#[case("\\boxed{7}\nWait, \\fbox{8}", "8")]
#[case("$\\boxed{7}$\nWait, $\\boxed{8}$", "8")]
#[case("\\boxed{7}\nNo, \\boxed{8}", "8")]
#[case("\\boxed{7}\nWait, it is \\boxed{8}", "8")]
#[case(r"$\boxed{7}$ and $\boxed{8}$", "7,8")]
#[case(r"\boxed{7} or \boxed{8}", "7,8")]
#[case(r"$x = \boxed{7}$, $y = \boxed{8}$", "7,8")]
#[case(r"$x = \boxed{7} , \boxed{8}$", "7,8")]
#[case(r"\boxed{7}, não, \boxed{8}", "8")]
#[case(r"\boxed{7}, нет, \boxed{8}", "8")]
#[case(r"\boxed{7}, 等等, \boxed{8}", "8")]
#[case(r"\boxed{7} 或 \boxed{8}", "7,8")]
// Fonts.
#[case(r"\boxed{\mathbf{2}}", "2")]
#[case(r"\boxed{\mathit{2}}", "2")]
#[case(r"\boxed{\bm{2}}", "2")]
#[case(r"\boxed{\mathsf{2}}", "2")]
#[case(r"\boxed{\large 2}", "2")]
#[case(r"\boxed{\boldsymbol{2}}", "2")]
#[case(r"\boxed{{\bf 2}}", "2")]
#[case(r"\boxed{\textbf{2}}", "2")]
#[case(r"\boxed{\mathbf{x}}", "x")]
#[case(r"\boxed{\displaystyle 2}", "2")]
#[case(r"\boxed{\mathtt{2}}", "2")]
#[case(r"\boxed{\underline{2}}", "2")]
#[case(r"\boxed{\emph{2}}", "2")]
#[case(r"\boxed{\mathbb{2}}", "2")]
#[case(r"\boxed{\mathnormal{2}}", "2")]
#[case(r"\boxed{\pmb{2}}", "2")]
#[case(r"\boxed{\mathscr{2}}", "2")]
#[case(r"\boxed{\mathfrak{2}}", "2")]
#[case(r"\boxed{\scriptsize 2}", "2")]
#[case(r"\boxed{\footnotesize 2}", "2")]
#[case(r"\boxed{\textcolor{red}{2}}", "2")]
#[case(r"\boxed{\color{red}{2}}", "2")]
#[case(r"\boxed{{\color{red} 2}}", "2")]
#[case(r"\boxed{\mathbb{R}}", r"(-\infty, \infty)")]
// Repeating decimals.
#[case(r"\boxed{0.\overline{3}}", "1/3")]
#[case(r"\boxed{0.1\overline{6}}", "1/6")]
#[case(r"\boxed{1.\bar{6}}", r"\frac{5}{3}")]
#[case(r"\boxed{-0.\overline{12}}", r"-\frac{4}{33}")]
#[case(r"\boxed{0.\overline{9}}", "1")]
#[case(r"\boxed{0.3333333}", r"$0.\overline{3}$")]
// Boxes that are not closed.
#[case(r"\boxed{7}", "7")]
// A list against a decimal comma in prose.
#[case("2, 3", "The total is 2,3.")]
// Boxes in one formula.
#[case(r"$$\boxed{3} \text{ for part (a) and } \boxed{1}$$", "1, 3")]
#[case(r"\[\boxed{3} \text{ in the first case, } \boxed{1}\]", "1, 3")]
#[case(r"\(\boxed{3}\) first, then \(\boxed{1}\)", "1")]
// Marks before and after a number.
#[case("First 7. The answer is _2_.", "2")]
#[case("First 7.\n__2__", "2")]
#[case("First 7. The answer is '2'.", "2")]
#[case("\"162\"", "162")]
#[case("`14000`", "14000")]
#[case("First 7. The answer is ≈ 2", "2")]
#[case("First 7. The answer is ~2.", "2")]
#[case("First $19.\nAnswer: \\$24", "24")]
#[case("First 7.\n**Answer:** **24**", "24")]
#[case("First 7. The answer is **4 + 38**.", "42")]
#[case("First 7.\n**Answer** = 24", "24")]
// The Unicode minus sign.
#[case("First 7. The answer is −15.", "-15")]
#[case("Answer - −15", "-15")]
#[case("The answer is 42 − 3.", "39")]
// Separators of thousands and decimals.
#[case("The answer is 1.234,50.", "1234.5")]
#[case("The answer is 1.234.567.", "1234567")]
#[case("The answer is 1 234,50.", "1234.5")]
#[case("The answer is 1\u{202f}234,50 €.", "1234.5")]
#[case("The answer is 1'234.50.", "1234.5")]
#[case(r"\boxed{1.234,00}", "1234")]
#[case(r"\boxed{1\,234{,}50}", "1234.5")]
#[case(r"\boxed{0{,}5}", "0.5")]
#[case(r"\boxed{1234{,}567}", "1234.567")]
#[case("The answers are 2,3,4.", "4, 3, 2")]
#[case("She pays $3, then $4", "4")]
// Scientific notation, and other signs of multiplication.
#[case("The answer is 2.04e2.", "204")]
#[case("The answer is 5.0E+1.", "50")]
#[case("It is 3.2 x 10^1.", "32")]
#[case("It is 3.2 · 10^1.", "32")]
#[case("The answer is 3 x 4.", "12")]
#[case("The answer is 5 million", "5000000")]
#[case("The answer is 1.5 thousand dollars.", "1500")]
// Mixed numbers and ratios.
#[case("The answer is 3 1/2.", "7/2")]
#[case("The answer is 6:4.", "3/2")]
// Several numbers.
#[case("The answer is 16 and 17.", "17, 16")]
#[case("The answers are 2, 3, and 4.", "2, 3, 4")]
#[case("The answers are 2 or 3 apples.", "2, 3")]
#[case("The answer is 18, and 3 are left.", "18")]
#[case("The answer is 18. 3 of them are red.", "18")]
#[case("The answer is 18, 3 more than before.", "18")]
// Units.
#[case(r"\boxed{12 apples}", "12")]
#[case(r"\boxed{12 cookies per day}", "12")]
#[case(r"\boxed{1,200 miles per hour}", "1200")]
#[case(r"\boxed{12 km/h}", "12")]
#[case(r"\boxed{12 \text{ km}^2}", "12")]
#[case(r"\boxed{\text{60 dollars}}", "60")]
#[case(r"\boxed{45\, \frac{\text{km}}{\text{h}}}", "45")]
// The mark after an expression is that before the next number.
#[case("There are 2 + 3\n18 in total", "18")]
// An announced answer is searched in the text after the announcement.
#[case(
    "First 7. The answer is, as I said above in the text that explains each of the steps in detail and at length, 9",
    "9"
)]
#[case("18. I hope that the answer is correct.", "18")]
#[case("The answer is twice as many, which is 36.", "36")]
// Amounts in two units.
#[case("The answer is 3 hours and 20 minutes.", "3 hours and 20 minutes")]
#[case("The answer is five.", "five")]
// Words after a number.
#[case(r"\boxed{5 million}", "5000000")]
#[case(r"\boxed{5 Million dollars}", "5000000")]
#[case("The answer is 5 Million.", "5000000")]
#[case(r"\boxed{5 more apples}", "5")]
#[case(r"\boxed{3 times}", "3")]
#[case(r"\boxed{5 per cent}", "5%")]
#[case("The answer is 5 less than x.", "5 less than x")]
// A box, and an announced answer without a value.
#[case("\\boxed{3}\n\nSo the answer is three.", "3")]
#[case(r"\boxed{18}. The answer is one I checked twice.", "18")]
#[case("\\boxed{12}\n\nThus the final answer is none other than 12.", "12")]
#[case("\\boxed{18}\nThe answer is not 17.", "18")]
#[case("\\boxed{7}\nWait, the answer is five.", "5")]
#[case("The answer is five (5).", "5")]
#[case("The answer is zero (0).", "0")]
#[case("The answer is twenty-five (25).", "25")]
#[case("Total: 3. The answer is three.", "3")]
#[case("Total: 3. The answer is **Three** apples.", "3")]
// Numbers in plain text as references and in boxes.
#[case("9/2", "4 1/2")]
#[case("The answer is 4 1/2.", "4 1/2")]
#[case(r"\boxed{4 1/2}", "9/2")]
#[case(r"\boxed{-4 1/2}", "-9/2")]
#[case("32", "3.2 x 10^1")]
#[case(r"\boxed{3.2 x 10^1}", "32")]
#[case("8", "2 (3+1)")]
// Times.
#[case("The answer is 2:10.", "2:10")]
#[case(r"\boxed{2:10}", "2:10")]
#[case("The answer is 2:10 pm.", "2:10 PM")]
#[case(r"\boxed{1:100}", "0.01")]
// Equations with amounts.
#[case("The answer is $18 - $3 = $15.", "15")]
#[case("The answer is 18 - 3 = 15.", "15")]
// Line breaks with a space, and formulas that are not closed.
#[case(
    "\\begin{aligned} x &= 3 \\\\[4pt] y &= 4 \\end{aligned}\n\\boxed{7}\nWait, \\boxed{8}",
    "8"
)]
#[case("We use \\[ here. \\boxed{7}\nWait, \\boxed{8}", "8")]
#[case("We use \\( here.\n\n\\boxed{7}\nWait, it is \\boxed{8}, as \\)", "8")]
#[case(r"It costs $5. \boxed{7}. Wait, \boxed{8}", "8")]
#[case(r"It costs \$5. \boxed{7}, then \boxed{8} or \$3", "8")]
#[case("The answer is 3 x (1 + 3).", "12")]
#[case("The answer is 2 x 3 + 4.", "10")]
#[case("It is 1 + 2 x 3", "7")]
#[case("The answer is 2 x 3 x 4.", "24")]
// Remarks, and a number for each of a unit.
#[case("The answer is 12 - i.e. a dozen.", "12")]
#[case("She works 5 days, 3 hours each day", "3")]
#[case(r"\boxed{5 Million}", "5000000")]
#[case("The answer is Twelve!", "12")]
#[case("4.5", "4 1/2")]
#[case(r"\boxed{4\frac12}", "4 1/2")]
#[case("The answer is 6:30.", "6:30")]
#[case("The ratio is 2:3.", "2/3")]
#[case("Let \\[ x.\n\n\\boxed{7}\nWait, \\boxed{8}", "8")]
#[case("3 boys and 4 girls", "3 boys and 4 girls")]
#[case(r"So $x \in (4, 25)$.", "$(4, 25)$")]
#[case(r"\boxed{\left(6, 54\right]}", "$(6, 54]$")]
#[case(r"\boxed{6, 54}", "$6$ and $54$")]
#[case(r"\boxed{\text{3 boys and 4 girls}}", "3 boys and 4 girls")]
#[case("all integers greater than 3", "all integers greater than 3")]
// Ratios with a label.
#[case(r"$\boxed{7:32}$", "$S_{MBCN}:S=7:32$")]
#[case("$11:21$", "$V_{1}:V_{2}=11:21$")]
#[case("$V_{1}:V_{2}=11:21$", "11:21")]
#[case(r"\boxed{\frac{11}{21}}", "$V_{1}:V_{2}=11:21$")]
#[case("$7 : 32$", "$AB : BC = 7 : 32$")]
#[case("18", "18 dollars")]
#[case("18", "She needs 18 eggs")]
// Hyphenated numbers.
#[case("The score is 3-2.", "3-2")]
#[case("It is a **3-4-5** triangle: 3-4-5", "3-4-5")]
#[case("Call 555-1234.", "555-1234")]
#[case(r"\boxed{3-2}", "3-2")]
#[case("$3-2$", "3-2")]
#[case("#### 10-20", "10-20")]
#[case("The answer is 18-inch.", "18")]
#[case("She is a 7-year-old.", "7")]
#[case("The answer is (5 - 2).", "3")]
#[case("The answer is 5-2*3.", "-1")]
#[case("The answer is 5*3-2.", "13")]
#[case("The answer is 10-3=7.", "7")]
#[case("The answer is 42−3.", "39")]
#[case("$42-3$", "39")]
#[case(r"\boxed{42-3}", "39")]
#[case("Answer - -15", "-15")]
#[case("\\boxed{7}\nThe final answer is 3-4.", "7")]
fn equal_answers(#[case] answer: &str, #[case] reference: &str) {
    assert!(matches(answer, reference), "{answer} = {reference}");
}

#[rstest]
#[case("1/2", "1/3")]
#[case("0.333", "1/3")]
#[case("28", "0.28")]
#[case("2800%", "0.28")]
#[case(r"\sqrt2", "1.41")]
#[case(r"4\sqrt{2}", "4")]
#[case(r"\frac{1}{2004!}", r"\frac{1}{2006!}")]
#[case("2^{99}", "2^{98}")]
#[case("10^{10^{10}}", "10^{10^{11}}")]
#[case("x+1", "x+2")]
#[case("x", "y")]
#[case("f(x)", "f(y)")]
#[case(r"\sin x", r"\cos x")]
#[case(r"\sqrt{x^2}", "x")]
#[case("(1, 2)", "(2, 1)")]
#[case("(1, 2)", "[1, 2]")]
#[case("1, 2", "1, 2, 3")]
#[case("1, 2, 3", "1, 2")]
#[case("[0,1)", "[0,1]")]
#[case(r"[0,1) \cup (2,3]", r"[0,1) \cup (2,4]")]
#[case("x < 1", "x > 1")]
#[case("x < 1", r"x \le 1")]
#[case("x < 1", "x = 1")]
#[case("x = 1", "y = 1")]
#[case("11a+c", "7 = 11a+c")]
#[case("1", "2x+z=1")]
#[case(
    r"\begin{pmatrix}1&2\end{pmatrix}",
    r"\begin{pmatrix}1\\2\end{pmatrix}"
)]
#[case("12:00", "1:00")]
#[case("1112_3", "1112_4")]
#[case(r"\boxed{32, 349}", "32349")]
#[case("AZYUK2A", "2")]
#[case("٢", "2")]
#[case("", "0")]
#[case("1/0", "0")]
#[case(r"\text{Eve}", r"\text{Evelyn}")]
// A list or a decimal comma.
#[case(r"\boxed{2.3}", "2,3")]
#[case("The solutions are 2 and 3.", "2,3")]
#[case(r"\boxed{0,5}", "0.5")]
// Texts between numbers.
#[case(r"\boxed{20}", r"3 \text{ hours } 20 \text{ minutes}")]
#[case(r"\boxed{20}", r"5 \text{ dollars and } 20 \text{ cents}")]
// Text after the number.
#[case("The answer is 42\n- 3 of them are red", "39")]
#[case("On 2024-05-01", "2018")]
#[case("The date is 2024-05-01", "2018")]
// Boxes that are not closed.
#[case("\\boxed{7}\nWait, \\boxed{8", "7")]
#[case(r"so \boxed{7} and then \boxed{8} ok", "7")]
#[case(r"The answer is 8, so \boxed{", "8")]
#[case(r"so \boxed{8", "8")]
// Boxes that are corrected.
#[case("\\boxed{7}\nWait, \\boxed{8}", "7, 8")]
#[case("\\boxed{7}\nHmm, no, \\boxed{8}", "7,8")]
// Marks before and after a number.
#[case("First 7. The answer is _2_.", "7")]
#[case("First 7.\n__2__", "7")]
#[case("First 7. The answer is '2'.", "7")]
#[case("First 7. The answer is ≈ 2", "7")]
#[case("First $19.\nAnswer: \\$24", "19")]
#[case("The answer is **4 + 38**.", "4")]
#[case("First 7. The answer is #2.", "7")]
// The Unicode minus sign.
#[case("The answer is −15.", "15")]
#[case("First 7. The answer is −15.", "7")]
#[case("The answer is 42 − 3.", "42")]
// Separators of thousands and decimals.
#[case("The answer is 1.234,50.", "1.234")]
#[case("The answer is 1 234,50.", "1234")]
#[case("The answer is 1.234.567.", "1.234")]
#[case("The answer is 1.2.3", "1.2")]
#[case(r"\boxed{1{,}5}", "15")]
#[case("The answer is $3, $4", "3")]
// Scientific notation, and other signs of multiplication.
#[case("The answer is 9.0e1.", "9")]
#[case("It is 3 x 10^2.", "100")]
#[case("The answer is 3 x 4.", "3")]
#[case("The answer is 5 million", "5")]
#[case("The answer is 16k", "16")]
// Mixed numbers, ratios, times and dates.
#[case("The answer is 3½.", "3")]
#[case("The answer is 3 1/2.", "3")]
#[case("The answer is 3:1.", "1")]
#[case("The answer is 12:30.", "12")]
#[case("The answer is 12:30pm.", "12")]
#[case("The answer is 31.12.2023", "31.12")]
#[case("The answer is 5-1-2024", "-2020")]
// Several numbers.
#[case("The answer is 16 and 17.", "16")]
#[case("The answer is 18 or 19.", "18")]
#[case("The answer is between 18 and 19.", "18")]
#[case("The answer is 18 to 19.", "18")]
#[case("The answers are 2, 3, and 4.", "2, 3")]
#[case("#### 18 or 19 apples", "19")]
#[case("She has 16 or 17 apples.", "17")]
#[case("The answer is 7 out of 10.", "7")]
// Amounts in two units.
#[case("The answer is 18 dollars and 50 cents.", "18")]
#[case("The answer is 3 hours and 20 minutes.", "3")]
#[case("It takes 3 hours 20 minutes.", "20")]
#[case("It takes 5 feet, 3 inches", "3")]
// Terms.
#[case("The answer is 2x.", "2")]
#[case("The answer is 2x + 3.", "2")]
#[case("The answer is 4√2.", "4")]
#[case("The answer is 3π.", "3")]
#[case("The answer is 3 pi.", "3")]
#[case("The answer is 2³.", "2")]
#[case("The answer is 3 + 2i.", "3")]
#[case("The answer is 3 * x.", "3")]
// Numbers in words, and words that change a number.
#[case("First 7. The answer is five.", "7")]
#[case("The answer is half of 18.", "18")]
#[case("The answer is more than 18.", "18")]
#[case("The answer is not 18.", "18")]
// Units.
#[case(r"\boxed{3 hours 20 minutes}", "3")]
#[case(r"\boxed{\text{3 hours 20 minutes}}", "3")]
#[case(r"\boxed{12 apples}", "12a")]
// The mark after an expression is that before the next number.
#[case("There are 2 + 3\n18 in total", "5")]
// Words after a number.
#[case(r"\boxed{5 less than x}", "5")]
#[case(r"\boxed{3 or more}", "3")]
#[case(r"\boxed{2 thirds}", "2")]
#[case(r"\boxed{3 dozen}", "3")]
#[case(r"\boxed{3 dozen eggs}", "3")]
#[case(r"\boxed{5 squared}", "5")]
#[case(r"\boxed{18 or nineteen}", "18")]
#[case(r"\boxed{10 minus n}", "10")]
#[case(r"\boxed{10 times x}", "10")]
#[case(r"\boxed{3 and a half}", "3")]
#[case(r"\boxed{5 Million}", "5")]
#[case(r"\boxed{5 million}", "5")]
#[case(r"\boxed{2 hundred thousand}", "200")]
#[case(r"\boxed{3 factorial}", "3")]
#[case(r"\boxed{5 degrees below zero}", "5")]
#[case(r"\boxed{3 point five}", "3")]
#[case(r"\boxed{\text{5 less than x}}", "5")]
#[case(r"\boxed{3 \text{ dozen}}", "3")]
#[case(r"\boxed{2 \text{ thirds}}", "2")]
#[case(r"\boxed{5 \text{ million}}", "5")]
#[case(r"\boxed{3 \text{ or more}}", "3")]
#[case(r"\boxed{5 \text{ less than } x}", "5")]
#[case(r"\boxed{3 \text{ and a half}}", "3")]
#[case(r"\boxed{3 \text{ squared}}", "3")]
#[case("The answer is 5 less than x.", "5")]
#[case("The answer is 5 less than y.", "5 less than x")]
#[case("The answer is 3 or more.", "3")]
#[case("The answer is 2 thirds.", "2")]
#[case("The answer is 3 dozen.", "3")]
#[case("She has 3 dozen eggs.", "3")]
#[case("The answer is 5 squared.", "5")]
#[case("The answer is 18 or nineteen.", "18")]
#[case("The answer is 10 minus n.", "10")]
#[case("The answer is 10 times x.", "10")]
#[case("The answer is 3 and a half.", "3")]
#[case("The answer is 3 factorial.", "3")]
#[case("The answer is 5 Million.", "5")]
#[case("The answer is 2 hundred thousand.", "200")]
#[case("The answer is 1/2 dozen.", "1/2")]
// Numbers in words.
#[case("The answer is one I checked twice.", "1")]
#[case("The answer is five hundred.", "5")]
#[case("The answer is two thirds.", "2")]
#[case("The answer is twenty-one.", "20")]
#[case("The answer is five or six.", "5")]
#[case("The answer is five (6).", "5")]
// Numbers in plain text as references and in boxes.
#[case("2", "4 1/2")]
#[case(r"\boxed{4 1/2}", "2")]
// Times.
#[case("The answer is 2:10.", "6:30")]
#[case("12:30", "0.4")]
#[case("3:30", "1/10")]
#[case(r"\boxed{3:30}", "1/10")]
#[case("$3:30$", "1/10")]
#[case("The answers are 2:10 and 3:30.", "1/5, 1/10")]
#[case("The answer is 2:10 am.", "2:10 pm")]
// Equations with amounts.
#[case("The answer is $18 - $3 = $15.", "18")]
#[case("The answer is $18 - $3.", "18")]
// Line breaks with a space, and formulas that are not closed.
#[case(
    "\\begin{aligned} x &= 3 \\\\[4pt] y &= 4 \\end{aligned}\n\\boxed{7}\nWait, \\boxed{8}",
    "7, 8"
)]
// A variable after a space.
#[case("The answer is 2 x + 3.", "6")]
#[case("The answer is 2 x + 3.", "2")]
#[case("The answer is 3 x - 4.", "-12")]
#[case("The answer is 3 x - 4.", "3")]
#[case("The answer is 5 + 2 x.", "7")]
// Ranges.
#[case("She has 18 to 19 apples.", "19")]
#[case("She has 18 to 19 apples.", "18")]
#[case("The answer is 18–19.", "18")]
#[case("The answer is 18–19.", "19")]
#[case("#### 18 to 19", "19")]
#[case("#### 18 to 19", "18")]
#[case("#### 18–19", "18")]
#[case("The answer is $18 to $19.", "18")]
#[case("The answer is 18 to 17.", "18 to 19")]
#[case("The answer is 18%–19%.", "18%")]
#[case("She has $5$ to $6$ apples.", "6")]
#[case("The answer is $5$ to $6$.", "5")]
#[case("The answer is $5$ dozen.", "5")]
#[case("The answer is $5$ less than $x$.", "5")]
#[case("The answer is $5$ million.", "5")]
#[case(r"\boxed{5\,\text{dozen}}", "5")]
#[case(r"The answer is 3 \frac{1}{2}.", "3")]
#[case("She has between 18 and 19 apples.", "19")]
// Amounts in two units.
#[case("The answer is 20 minutes 0 seconds", "0")]
#[case("The answer is 5 days, 3 hours each day.", "5")]
#[case("The answer is 12:30.", "0.4")]
#[case("The answer is 3 + i.", "3")]
// A comma of a reference is none of decimals.
#[case(r"\boxed{2.3}", "#### 2,3")]
#[case(r"\boxed{2.3}", "The answer is 2,3")]
// References that no single number says.
#[case(r"\boxed{4}", r"\text{Alice: } 3, \text{ Bob: } 4")]
#[case(r"\boxed{4}", r"3 \text{ miles/hour and } 4 \text{ miles/hour}")]
#[case(r"\boxed{20}", r"3 \text{ man-hours } 20 \text{ minutes}")]
#[case("4", "Team A: 3, Team B: 4")]
#[case("4", "3 boys and 4 girls")]
#[case("20", "3 h 20 min")]
#[case("3", "all integers greater than 3")]
#[case("5", "not 5")]
// Boxes of other forms.
#[case("\\boxed{7}\nWait, \\boxed 8", "7")]
#[case("\\boxed{7}\nWait, \\fbox{8}", "7")]
#[case("\\boxed{7}\nWait, \\fbox{8", "7")]
// Headings.
#[case("#### Step 2: add 3 and 4\nThe answer is 42.", "4")]
#[case("The answer is 3.\n#### Final Answer\n42", "3")]
#[case("#### ~~41~~ 42", "41")]
// A line over digits.
#[case(r"\boxed{\overline{2}}", "2")]
#[case(r"\boxed{0.\overline{3}}", "0.3")]
#[case(r"\boxed{0.1\overline{6}}", "0.16")]
// Ratios with a label.
#[case(r"\boxed{11:20}", "$V_{1}:V_{2}=11:21$")]
#[case(r"\boxed{21:11}", "$V_{1}:V_{2}=11:21$")]
#[case(r"\boxed{V_2:V_1 = 11:21}", "$V_{1}:V_{2}=11:21$")]
#[case("1/10", "$t = 3:30$")]
// Hyphenated numbers.
#[case("The score is 3-2.", "1")]
#[case("3-2", "1")]
#[case("(3-2)", "1")]
#[case("1", "3-2")]
#[case("They won (3-2).", "1")]
#[case("A 3-4-5 triangle", "-6")]
#[case("The answer is 3-4-5.", "-6")]
#[case("It is a 3-4-5.", "3")]
#[case("It is a 3-4-5.", "5")]
#[case("A 3-4-5", "3-5-4")]
#[case("Call 555-1234", "-679")]
#[case("Call 1-800-555-1234.", "-2588")]
#[case("The answer is 10-20.", "-10")]
#[case("The answer is 10-20.", "10")]
#[case("The answer is 10-20.", "20")]
#[case("The answer is 10-20%.", "10")]
#[case("The answer is 10-20%.", "20%")]
#[case("The answer is $10-20.", "-10")]
#[case("The answer is $10-$20.", "10")]
#[case("It takes 2-3 hours.", "-1")]
#[case("It takes 2-3 hours", "2")]
#[case("The answer is 2.5-3.5.", "-1")]
#[case("The answer is 1,000-1,500.", "-500")]
#[case("The answer is 3-1/2 cups.", "5/2")]
#[case("The answer is 1/2-3/4 cup.", "-1/4")]
#[case("The answers are 3-2 and 4-1.", "1, 3")]
#[case("They ended 3-2 or 4-1.", "1, 3")]
#[case("The year is 2023-24.", "1999")]
#[case("#### 18-19", "-1")]
#[case("#### 18-19", "18")]
fn unequal_answers(#[case] answer: &str, #[case] reference: &str) {
    assert!(!matches(answer, reference), "{answer} = {reference}");
}

#[test]
fn decimals_bound_the_difference() {
    let row = json!({"answer": "1/3"});
    let reward = |decimals| MathReward {
        decimals,
        ..MathReward::default()
    };
    assert!(reward(3).matches("0.333", &row).unwrap());
    assert!(!reward(4).matches("0.333", &row).unwrap());
    assert!(reward(31).validate().is_err());
}

#[test]
fn the_place_and_the_column_are_options() {
    let reward = MathReward {
        column: "sum".to_owned(),
        find: AnswerPlace::FirstLine,
        ..MathReward::default()
    };
    assert!(reward.matches("x = 3\n4", &json!({"sum": 3})).unwrap());
    assert!(!reward.matches("4\n3", &json!({"sum": 3})).unwrap());
    for (row, message) in [
        (json!({"sum": [3]}), "must be a number"),
        (json!({}), "absent"),
    ] {
        let error = reward.matches("3", &row).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn expressions_beyond_a_bound_have_no_value() {
    let nested = |depth: usize| "(".repeat(depth) + "1" + &")".repeat(depth);
    assert!(parse(&nested(35)).is_some());
    assert!(parse(&nested(45)).is_none());
    assert!(parse(&"7".repeat(1000)).is_some());
    assert!(parse(&"7".repeat(1001)).is_none());
    assert!(parse("(x+1)^{32}").is_some());
    assert!(parse("(x+1)^{33}").is_none());
    // Text that is the same is equal all the same.
    assert!(matches(&nested(45), &nested(45)));
    assert!(!matches(&nested(45), "1"));
}

/// An expression with a value that is computed here, without the parser.
#[derive(Debug, Clone)]
enum Tree {
    Number(i64),
    Variable(usize),
    Sum(Box<Tree>, Box<Tree>),
    Difference(Box<Tree>, Box<Tree>),
    Product(Box<Tree>, Box<Tree>),
    Power(Box<Tree>, u32),
}

fn trees() -> impl Strategy<Value = Tree> {
    let leaf = prop_oneof![
        (0i64..20).prop_map(Tree::Number),
        (0usize..3).prop_map(Tree::Variable)
    ];
    leaf.prop_recursive(4, 12, 2, |inner| {
        let pair = || {
            (
                inner.clone().prop_map(Box::new),
                inner.clone().prop_map(Box::new),
            )
        };
        prop_oneof![
            pair().prop_map(|(a, b)| Tree::Sum(a, b)),
            pair().prop_map(|(a, b)| Tree::Difference(a, b)),
            pair().prop_map(|(a, b)| Tree::Product(a, b)),
            (inner.clone().prop_map(Box::new), 0u32..3).prop_map(|(a, n)| Tree::Power(a, n)),
        ]
    })
}

impl Tree {
    fn latex(&self) -> String {
        match self {
            Self::Number(n) => n.to_string(),
            Self::Variable(i) => ["x", "y", r"\alpha"][*i].to_owned(),
            Self::Sum(a, b) => format!(r"\left({} + {}\right)", a.latex(), b.latex()),
            Self::Difference(a, b) => format!("{{{} - ({})}}", a.latex(), b.latex()),
            Self::Product(a, b) => format!(r"{} \cdot {}", a.latex(), b.latex()),
            Self::Power(a, n) => format!("({})^{{{n}}}", a.latex()),
        }
    }

    fn plain(&self) -> String {
        match self {
            Self::Number(n) => n.to_string(),
            Self::Variable(i) => ["x", "y", "α"][*i].to_owned(),
            Self::Sum(a, b) => format!("({}+{})", b.plain(), a.plain()),
            Self::Difference(a, b) => format!("(-{}+{})", b.plain(), a.plain()),
            Self::Product(a, b) => format!("({})({})", b.plain(), a.plain()),
            Self::Power(a, n) => format!("({})**{n}", a.plain()),
        }
    }

    fn at(&self, point: [i64; 3]) -> BigRational {
        match self {
            Self::Number(n) => BigRational::from_integer((*n).into()),
            Self::Variable(i) => BigRational::from_integer(point[*i].into()),
            Self::Sum(a, b) => a.at(point) + b.at(point),
            Self::Difference(a, b) => a.at(point) - b.at(point),
            Self::Product(a, b) => a.at(point) * b.at(point),
            Self::Power(a, n) => num_traits::pow::Pow::pow(a.at(point), *n),
        }
    }
}

fn equal(a: &Value, b: &Value) -> bool {
    Comparison::new(6).equal(a, b)
}

/// Parts in expressions, in any order.
fn fragments() -> impl Strategy<Value = String> {
    let fragment = prop::sample::select(vec![
        "1",
        "2",
        "0",
        "9999999999",
        ".5",
        "x",
        "y",
        "e",
        "i",
        "+",
        "-",
        "*",
        "/",
        "^",
        "!",
        "%",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        r"\{",
        r"\}",
        "|",
        ",",
        ";",
        ":",
        "=",
        "<",
        r"\le ",
        r"\frac",
        r"\sqrt",
        r"\sqrt[3]",
        r"\pm ",
        r"\cup ",
        r"\infty ",
        r"\pi ",
        r"\sin ",
        r"\ln ",
        r"\log_2 ",
        r"\text{and}",
        r"\text{cm}",
        "$",
        r"\boxed{",
        r"\begin{pmatrix}",
        r"\end{pmatrix}",
        "&",
        r"\\",
        r"\sum_{k=1}^n ",
        "_",
        "'",
        " ",
        "f(",
        r"\binom",
        r"\left(",
        r"\right)",
        "²",
        "½",
        "٣",
        r"\in ",
        "and",
        "10^",
        "^{99}",
    ]);
    prop::collection::vec(fragment, 0..40).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn two_ways_to_write_an_expression_are_equal(tree in trees()) {
        let (latex, plain) = (parse(&tree.latex()).unwrap(), parse(&tree.plain()).unwrap());
        prop_assert!(equal(&latex, &plain), "{} and {}", tree.latex(), tree.plain());
    }

    #[test]
    fn expressions_are_equal_if_their_values_are(a in trees(), b in trees()) {
        // Degrees are at most 32 in each variable.
        let same = (0..40).all(|x| {
            let point = [x - 20, (x * 7) % 41 - 20, (x * 11) % 37 - 18];
            a.at(point) == b.at(point)
        });
        let (a, b) = (parse(&a.latex()).unwrap(), parse(&b.plain()).unwrap());
        prop_assert_eq!(equal(&a, &b), same);
    }

    #[test]
    fn equality_is_reflexive_and_symmetric(a in fragments(), b in fragments()) {
        let (a, b) = (parse(&a), parse(&b));
        if let Some(a) = &a
            && !matches!(a, Value::Text(_))
            && !format!("{a:?}").contains("Text")
        {
            prop_assert!(equal(a, a), "{a:?}");
        }
        if let (Some(a), Some(b)) = (a, b) {
            prop_assert_eq!(equal(&a, &b), equal(&b, &a));
        }
    }

    #[test]
    fn any_text_ends_soon(text in ".*", fragments in fragments()) {
        let start = Instant::now();
        for text in [&text, &fragments] {
            let _ = matches(text, "x^2+1");
            let _ = matches(&format!(r"\boxed{{{text}}}"), &format!(r"\boxed{{{text}}}"));
        }
        prop_assert!(start.elapsed() < WATCHDOG);
    }
}

/// Answers that would need much time or memory.
fn hostile() -> Vec<String> {
    let mega = 1 << 20;
    let mut answers = vec![
        "(".repeat(mega),
        "{".repeat(2000) + "1" + &"}".repeat(2000),
        "(".repeat(700) + "1" + &")".repeat(700),
        "-".repeat(4000) + "1",
        "1".repeat(mega),
        "1 ".repeat(mega),
        "$".repeat(mega),
        "$1$,".repeat(mega / 4),
        r"\[".repeat(mega / 2),
        r"\boxed{".repeat(mega / 8),
        r"\boxed{1} and ".repeat(mega / 16),
        r"\boxed 1 ".repeat(mega / 16),
        "box".repeat(mega / 4),
        "####".repeat(mega / 4),
        "#### \n".repeat(mega / 8),
        "=>".repeat(mega / 2),
        r"\therefore ".repeat(mega / 16),
        "~~".repeat(mega / 2),
        "#### ".to_owned() + &"~~1".repeat(mega / 4),
        r"0.\overline{".repeat(200),
        format!(r"0.\overline{{{}}}", "1".repeat(998)),
        "A:".repeat(mega / 2) + "=1:1",
        "answer is ".repeat(mega / 8),
        "the final answer ".repeat(mega / 16),
        "9^".repeat(1000) + "9",
        "9^{".repeat(1000) + "9" + &"}".repeat(1000),
        "9^9^9^9^9^9".to_owned(),
        "2^{1000000000}".to_owned(),
        "10^{999999999}+1".to_owned(),
        "1e999999999".to_owned(),
        "1e-2147483648".to_owned(),
        "123456789!".to_owned(),
        "5!!!!!!".to_owned(),
        r"\binom{1000000000}{500000000}".to_owned(),
        "(a+b+c+d+e+f+g+h)^{1000000}".to_owned(),
        "(a+b+c+d+x+f+g+h)^{32}".to_owned(),
        "(x+1)".repeat(800),
        "(x+y+1)^{20}".repeat(300),
        "(a+b)(c+d)(x+y)(m+n)(p+q)(r+s)(u+v)(w+z)".repeat(40),
        r"\sqrt{1+".repeat(30) + "x" + &"}".repeat(30),
        r"\sqrt{2}+\sqrt{3}+\sqrt{5}+\sqrt{7}".repeat(90),
        format!(
            "({})^{{31}}",
            (2..20)
                .map(|n| format!(r"\sqrt{{{n}}}"))
                .collect::<Vec<_>>()
                .join("+")
        ),
        format!(r"\sqrt{{{}}}", "7".repeat(999)),
        r"\sin(".repeat(35) + "x" + &")".repeat(35),
        r"\pm 1".repeat(700),
        "1,".repeat(2000),
        "(1,2),".repeat(600) + "3",
        r"\{".repeat(38) + "1" + &r"\}".repeat(38),
        r"\begin{pmatrix}".to_owned() + &"1&".repeat(700) + r"1\end{pmatrix}",
        "x^{9223372036854775807}x^{9223372036854775807}".to_owned(),
        "٣".repeat(mega),
        "\u{0}".repeat(mega),
    ];
    answers.extend((1..9).map(|n| format!("{}^{{{}}}", "9".repeat(n * 100), "9".repeat(n))));
    answers
}

/// `hostile_answers_fit_into_memory` runs it, where that test exists.
#[test]
#[cfg_attr(target_os = "linux", ignore)]
fn hostile_answers_end_soon() {
    for answer in hostile() {
        for text in [answer.clone(), format!(r"\boxed{{{answer}}}")] {
            let start = Instant::now();
            let _ = matches(&text, "7");
            let _ = matches(&text, &text);
            let shown: String = text.chars().take(40).collect();
            assert!(start.elapsed() < WATCHDOG, "{shown}");
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn hostile_answers_fit_into_memory() {
    // In a separate process, which may map half a gibibyte.
    let test = std::env::current_exe().unwrap();
    let limited = std::process::Command::new("sh")
        .args(["-c", "ulimit -v 524288; exec \"$0\" \"$@\""])
        .arg(test)
        .args([
            "math::tests::hostile_answers_end_soon",
            "--exact",
            "--include-ignored",
            "--test-threads=1",
        ])
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&limited.stdout);
    assert!(
        limited.status.success() && output.contains("1 passed"),
        "{output}"
    );
}
