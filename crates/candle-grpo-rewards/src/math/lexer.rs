//! Tokens in LaTeX and plain text.

use num_bigint::BigInt;
use num_rational::BigRational;

use super::limits::{MAX_DIGITS, MAX_EXPRESSION_BYTES, MAX_TOKENS};
use crate::answer::closing;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token {
    /// A number, and whether it is a whole number.
    Number(BigRational, bool),
    /// A variable with its subscript.
    Symbol(String),
    /// A command without its backslash, or a function name.
    Command(String),
    /// The root with an index.
    Root(i64),
    /// A bracket, an operator or a comma. `{` groups; `s` and `S` are set braces.
    Char(char),
    /// A relation.
    Relation(Relation),
    /// Words.
    Text(String),
    /// A matrix's start and end, and the end of a row.
    Begin,
    End,
    Row,
    /// `and` or `or`.
    And,
    Percent,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Relation {
    Equal,
    Unequal,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
}

const FUNCTIONS: &[&str] = &[
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh",
    "ln", "log", "lg", "exp", "sqrt", "abs", "floor", "ceil", "det", "gcd", "lcm", "max", "min",
];

const UNITS: &[&str] = &[
    "mm", "cm", "dm", "km", "kg", "mg", "ml", "mL", "ft", "feet", "foot", "inch", "inches",
    "meter", "meters", "metre", "metres", "mile", "miles", "yard", "yards", "gram", "grams",
    "liter", "liters", "second", "seconds", "sec", "minute", "minutes", "min", "mins", "hour",
    "hours", "hr", "hrs", "day", "days", "week", "weeks", "month", "months", "year", "years",
    "dollar", "dollars", "cent", "cents", "euro", "euros", "degree", "degrees", "deg", "unit",
    "units", "sq", "square", "cubic", "mph", "kmh", "pound", "pounds", "lb", "lbs", "ounce",
    "ounces", "oz", "point", "points", "people", "times", "rad", "radians", "am", "pm", "yuan",
];

const GREEK: &[&str] = &[
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "varepsilon",
    "zeta",
    "eta",
    "theta",
    "vartheta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "rho",
    "sigma",
    "tau",
    "upsilon",
    "phi",
    "varphi",
    "chi",
    "psi",
    "omega",
    "Gamma",
    "Delta",
    "Theta",
    "Lambda",
    "Xi",
    "Sigma",
    "Phi",
    "Psi",
    "Omega",
    "ell",
    "imath",
    "angle",
    "triangle",
    "prime",
    "star",
    "hbar",
];

const GREEK_LETTERS: &[(char, &str)] = &[
    ('α', "alpha"),
    ('β', "beta"),
    ('γ', "gamma"),
    ('δ', "delta"),
    ('ε', "epsilon"),
    ('θ', "theta"),
    ('λ', "lambda"),
    ('μ', "mu"),
    ('ν', "nu"),
    ('ρ', "rho"),
    ('σ', "sigma"),
    ('τ', "tau"),
    ('φ', "phi"),
    ('ψ', "psi"),
    ('ω', "omega"),
    ('Δ', "Delta"),
    ('Γ', "Gamma"),
    ('Σ', "Sigma"),
    ('Ω', "Omega"),
];

const SKIPPED: &[&str] = &[
    "left",
    "right",
    "big",
    "Big",
    "bigg",
    "Bigg",
    "bigl",
    "bigr",
    "Bigl",
    "Bigr",
    "biggl",
    "biggr",
    "displaystyle",
    "textstyle",
    "limits",
    "quad",
    "qquad",
    "mathop",
    "boxed",
    "fbox",
    "hline",
    "nonumber",
    "scriptstyle",
    "scriptscriptstyle",
    "scriptsize",
    "footnotesize",
    "tiny",
    "small",
    "normalsize",
    "large",
    "Large",
    "LARGE",
    "huge",
    "Huge",
    "bf",
    "it",
    "rm",
    "sf",
    "tt",
];

const TEXT: &[&str] = &[
    "text",
    "textbf",
    "textit",
    "textrm",
    "textnormal",
    "mbox",
    "hbox",
    "textup",
    "texttt",
    "textsf",
    "emph",
    "mathrm",
    "operatorname",
];

const STYLED: &[&str] = &[
    "mathbf",
    "mathit",
    "mathcal",
    "mathsf",
    "mathtt",
    "mathscr",
    "mathfrak",
    "mathnormal",
    "boldsymbol",
    "bold",
    "bm",
    "pmb",
    "underline",
    "vec",
    "overline",
    "bar",
    "hat",
    "tilde",
    "overrightarrow",
    "widehat",
];

/// Splits an expression into tokens. Returns `None` if a part of it is unknown.
pub(super) fn tokens(text: &str) -> Option<Vec<Token>> {
    if text.len() > MAX_EXPRESSION_BYTES {
        return None;
    }
    let mut lexer = Lexer {
        rest: text,
        tokens: Vec::new(),
        braces: Vec::new(),
        arguments: Vec::new(),
        brackets: 0,
        matrices: 0,
    };
    while !lexer.rest.is_empty() {
        lexer.next()?;
        if lexer.tokens.len() > MAX_TOKENS {
            return None;
        }
    }
    Some(lexer.tokens)
}

struct Lexer<'a> {
    rest: &'a str,
    tokens: Vec<Token>,
    /// Open braces: true for set braces.
    braces: Vec<bool>,
    /// Commands that still need arguments: the number of open braces at the command, and of
    /// missing arguments.
    arguments: Vec<(usize, u8)>,
    /// Open brackets, inside which a comma separates elements.
    brackets: usize,
    matrices: usize,
}

impl<'a> Lexer<'a> {
    fn push(&mut self, token: Token) {
        self.tokens.push(token);
    }

    fn skip(&mut self, bytes: usize) {
        self.rest = &self.rest[bytes..];
    }

    fn relation(&mut self, bytes: usize, relation: Relation) -> Option<()> {
        self.skip(bytes);
        self.push(Token::Relation(relation));
        Some(())
    }

    /// Counts an argument for the last command. Returns true if one was missing here.
    fn is_argument(&mut self) -> bool {
        match self.arguments.last_mut() {
            Some((depth, missing)) if *depth == self.braces.len() => {
                *missing -= 1;
                if *missing == 0 {
                    self.arguments.pop();
                }
                true
            }
            _ => false,
        }
    }

    fn next(&mut self) -> Option<()> {
        let c = self.rest.chars().next()?;
        if c.is_whitespace() || matches!(c, '~' | '$' | '€' | '£' | '°' | '¢') {
            self.skip(c.len_utf8());
            return Some(());
        }
        if c != '{' && c != '\\' && self.is_argument() {
            // `\frac12` has one-digit arguments.
            if let Some(digit) = c.to_digit(10) {
                self.skip(1);
                let digit = BigRational::from_integer(digit.into());
                self.push(Token::Number(digit, true));
                return Some(());
            }
        }
        if c.is_ascii_digit() || (c == '.' && self.digits(1) > 0) {
            return self.number();
        }
        if c.is_ascii_alphabetic() {
            return self.word();
        }
        match c {
            '\\' => return self.command(),
            '{' => {
                if self.thousands() {
                    return Some(());
                }
                self.is_argument();
                self.braces.push(false);
                self.push(Token::Char('{'));
            }
            '}' => {
                if self.braces.pop()? {
                    return None;
                }
                let depth = self.braces.len();
                self.arguments.retain(|(at, _)| *at <= depth);
                self.push(Token::Char('}'));
            }
            '(' | '[' => {
                self.brackets += 1;
                self.push(Token::Char(c));
            }
            ')' | ']' => {
                self.brackets = self.brackets.saturating_sub(1);
                self.push(Token::Char(c));
            }
            '+' | '-' | '*' | '/' | '^' | '!' | '|' | ',' | ';' | ':' | '\'' => {
                if self.rest.starts_with("!=") {
                    return self.relation(2, Relation::Unequal);
                }
                if self.rest.starts_with("**") {
                    self.skip(1);
                    self.push(Token::Char('^'));
                } else {
                    self.push(Token::Char(c));
                }
            }
            '&' if self.matrices > 0 => self.push(Token::Char('&')),
            '&' => {}
            '%' => self.push(Token::Percent),
            '_' => return self.symbol(""),
            '<' if self.rest.starts_with("<=") => return self.relation(2, Relation::LessOrEqual),
            '>' if self.rest.starts_with(">=") => {
                return self.relation(2, Relation::GreaterOrEqual);
            }
            '<' => return self.relation(1, Relation::Less),
            '>' => return self.relation(1, Relation::Greater),
            '=' => {
                let length = if self.rest.starts_with("==") { 2 } else { 1 };
                return self.relation(length, Relation::Equal);
            }
            _ => return self.unicode(c),
        }
        self.skip(c.len_utf8());
        Some(())
    }

    /// Handles a symbol outside ASCII.
    fn unicode(&mut self, c: char) -> Option<()> {
        let length = c.len_utf8();
        let relation = match c {
            '≤' | '⩽' => Some(Relation::LessOrEqual),
            '≥' | '⩾' => Some(Relation::GreaterOrEqual),
            '≠' => Some(Relation::Unequal),
            '≈' => Some(Relation::Equal),
            '∈' => Some(Relation::In),
            _ => None,
        };
        if let Some(relation) = relation {
            return self.relation(length, relation);
        }
        let exponent = "⁰¹²³⁴⁵⁶⁷⁸⁹".chars().position(|digit| digit == c);
        if let Some(digit) = exponent {
            self.push(Token::Char('^'));
            let digit = BigRational::from_integer(digit.into());
            self.push(Token::Number(digit, true));
        } else {
            let token = match c {
                '−' | '–' => Token::Char('-'),
                '×' | '·' | '⋅' | '∙' => Token::Char('*'),
                '÷' => Token::Char('/'),
                '±' => Token::Command("pm".to_owned()),
                '∪' => Token::Command("cup".to_owned()),
                '∞' => Token::Command("infty".to_owned()),
                '∅' => Token::Command("emptyset".to_owned()),
                'π' => Token::Command("pi".to_owned()),
                '√' => Token::Root(2),
                _ => {
                    let (_, name) = GREEK_LETTERS.iter().find(|(letter, _)| *letter == c)?;
                    self.skip(length);
                    return self.symbol(name);
                }
            };
            self.push(token);
        }
        self.skip(length);
        Some(())
    }

    /// Counts the ASCII digits after `from` bytes.
    fn digits(&self, from: usize) -> usize {
        let bytes = self.rest.as_bytes();
        let digits = bytes.get(from..).unwrap_or_default().iter();
        digits.take_while(|byte| byte.is_ascii_digit()).count()
    }

    /// Skips `{,}`, a thousands separator.
    fn thousands(&mut self) -> bool {
        let inside = self.rest[1..].trim_start();
        let Some(after) = inside.strip_prefix(',') else {
            return false;
        };
        match after.trim_start().strip_prefix('}') {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    /// Returns the length of a thousands separator after `at` bytes, if a group of three digits
    /// follows.
    fn group(&self, at: usize) -> Option<usize> {
        let rest = &self.rest[at..];
        let trimmed = rest.trim_start();
        let spaced = rest.len() - trimmed.len();
        let length = ["\\!,\\!", ",\\!", "{,}\\!", "{,}", "{, }", "\\,"]
            .iter()
            .find(|mark| trimmed.starts_with(**mark))
            .map(|mark| spaced + mark.len())
            .map(|length| length + rest[length..].len() - rest[length..].trim_start().len());
        let plain = || match rest.as_bytes().first() {
            Some(b',') if self.brackets == 0 && !self.braces.contains(&true) => Some(1),
            Some(b' ') => Some(1),
            _ => None,
        };
        let length = length.or_else(plain)?;
        (self.digits(at + length) == 3).then_some(length)
    }

    fn number(&mut self) -> Option<()> {
        let mut end = self.digits(0);
        let mut digits = self.rest[..end].to_owned();
        if (1..=3).contains(&end) && !self.rest.starts_with('0') {
            while let Some(separator) = self.group(end) {
                digits.push_str(&self.rest[end + separator..end + separator + 3]);
                end += separator + 3;
            }
        }
        // `{,}` that does not separate thousands is a decimal comma.
        let point = [".", "{,}"]
            .into_iter()
            .find(|point| self.rest[end..].starts_with(point))
            .map_or(0, str::len);
        let mut decimals = 0;
        if point > 0 {
            decimals = self.digits(end + point);
            digits.push_str(&self.rest[end + point..end + point + decimals]);
            if decimals > 0 {
                end += point + decimals;
            } else if self.rest[end + point..].trim_start().is_empty() {
                end += point;
            }
        }
        let period = match (point, decimals) {
            (0, _) => None,
            (_, 0) => self.period(end + point),
            _ => self.period(end),
        };
        if digits.len() + period.map_or(0, |(from, to)| to - from) > MAX_DIGITS {
            return None;
        }
        if let Some(period) = period {
            return self.repeating(&digits, decimals, period);
        }
        let mut exponent = 0;
        if let Some(after) = self.rest[end..].strip_prefix(['e', 'E']) {
            let signed = usize::from(after.starts_with(['-', '+']));
            let length = self.digits(end + 1 + signed);
            let written = &self.rest[end + 1..end + 1 + signed + length];
            if length > 0 {
                exponent = written.parse::<i32>().ok()?;
                end += 1 + signed + length;
            }
        }
        // `204_5` is a numeral in a base: a symbol.
        if self.rest[end..].starts_with('_') && decimals == 0 {
            self.skip(end);
            return self.symbol(&digits);
        }
        let exponent = exponent.checked_sub(decimals as i32)?;
        if exponent.unsigned_abs() as usize > MAX_DIGITS {
            return None;
        }
        let number = BigRational::from_integer(digits.parse::<BigInt>().ok()?);
        let ten = BigRational::from_integer(10.into());
        let number = number * num_traits::pow::Pow::pow(&ten, exponent);
        self.push(Token::Number(number, decimals == 0));
        self.skip(end);
        Some(())
    }

    /// Returns the range of the digits in `\overline{3}` after `at` bytes.
    fn period(&self, at: usize) -> Option<(usize, usize)> {
        let rest = self.rest.get(at..)?;
        let names = ["\\overline{", "\\bar{"];
        let name = names.iter().find(|name| rest.starts_with(**name))?;
        let from = at + name.len();
        let to = from + self.digits(from);
        (to > from && self.rest[to..].starts_with('}')).then_some((from, to))
    }

    /// Parses a repeating decimal, which is a fraction.
    fn repeating(&mut self, digits: &str, decimals: usize, period: (usize, usize)) -> Option<()> {
        let repeated = &self.rest[period.0..period.1];
        let power = |exponent: usize| num_traits::pow::pow(BigInt::from(10), exponent);
        let nines = power(repeated.len()) - 1;
        let number = digits.parse::<BigInt>().ok()? * &nines + repeated.parse::<BigInt>().ok()?;
        let number = BigRational::new(number, nines * power(decimals));
        self.push(Token::Number(number, true));
        self.skip(period.1 + 1);
        Some(())
    }

    /// Parses letters without a backslash.
    fn word(&mut self) -> Option<()> {
        let letters = self.rest.bytes().take_while(u8::is_ascii_alphabetic);
        let length = letters.count();
        let word = &self.rest[..length];
        let lower = word.to_ascii_lowercase();
        let after_value = self.tokens.last().is_some_and(|token| {
            matches!(
                token,
                Token::Number(..) | Token::Percent | Token::Char(')' | '}')
            )
        });
        let token = match lower.as_str() {
            "and" | "or" => Token::And,
            "percent" | "percentage" | "pct" => Token::Percent,
            "pi" => Token::Command("pi".to_owned()),
            "infinity" | "inf" | "oo" => Token::Command("infty".to_owned()),
            "sqrt" => Token::Root(2),
            "in" if !after_value => Token::Relation(Relation::In),
            _ if length > 1 && FUNCTIONS.contains(&word) => Token::Command(word.to_owned()),
            _ if length > 1 && after_value && UNITS.contains(&word) => {
                self.skip(length);
                self.unit_power();
                return Some(());
            }
            _ => {
                let letter = &self.rest[..1].to_owned();
                self.skip(1);
                return self.symbol(letter);
            }
        };
        self.push(token);
        self.skip(length);
        Some(())
    }

    /// Parses a unit's power, as in `cm^2`, and the unit after it in `km/h`.
    fn unit_power(&mut self) {
        let rest = self.rest.trim_start();
        for power in ["^2", "^3", "^{2}", "^{3}", "²", "³"] {
            if let Some(rest) = rest.strip_prefix(power) {
                self.rest = rest;
                return;
            }
        }
        if let Some(rest) = rest.strip_prefix('/') {
            let letters = rest.bytes().take_while(u8::is_ascii_alphabetic).count();
            let unit = &rest[..letters];
            if UNITS.contains(&unit) || matches!(unit, "h" | "s" | "m" | "l" | "L") {
                self.rest = &rest[letters..];
                self.unit_power();
            }
        }
    }

    /// Parses a variable: its name, with the subscript and primes that follow.
    fn symbol(&mut self, name: &str) -> Option<()> {
        let mut name = name.to_owned();
        let rest = self.rest.trim_start();
        if let Some(subscript) = rest.strip_prefix('_') {
            self.rest = subscript.trim_start();
            let inside = if self.rest.starts_with('{') {
                self.group_text()?.to_owned()
            } else {
                let first = self.rest.chars().next()?;
                let length = match first {
                    '\\' => {
                        1 + self.rest[1..]
                            .bytes()
                            .take_while(u8::is_ascii_alphabetic)
                            .count()
                    }
                    '0'..='9' => self.digits(0),
                    _ => first.len_utf8(),
                };
                let inside = self.rest[..length].to_owned();
                self.skip(length);
                inside
            };
            let plain = inside.replace("\\text", "").replace("\\mathrm", "");
            name.push('_');
            name.extend(
                plain
                    .chars()
                    .filter(|c| !c.is_whitespace() && !"{}\\".contains(*c)),
            );
        }
        while let Some(rest) = self.rest.strip_prefix('\'') {
            name.push('\'');
            self.rest = rest;
        }
        self.push(Token::Symbol(name));
        Some(())
    }

    /// Consumes `{...}` and returns the text inside.
    fn group_text(&mut self) -> Option<&'a str> {
        let rest = self.rest.trim_start().strip_prefix('{')?;
        let end = closing(rest)?;
        self.rest = &rest[end + 1..];
        Some(&rest[..end])
    }

    fn command(&mut self) -> Option<()> {
        let after = &self.rest[1..];
        let letters = after.bytes().take_while(u8::is_ascii_alphabetic).count();
        if letters == 0 {
            let c = after.chars().next()?;
            match c {
                '\\' => {
                    // A doubled backslash before a command, outside a matrix.
                    if self.matrices == 0 {
                        self.skip(1);
                    } else {
                        self.push(Token::Row);
                        self.skip(2);
                    }
                    return Some(());
                }
                '{' => {
                    self.braces.push(true);
                    self.push(Token::Char('s'));
                }
                '}' => {
                    self.braces.pop().filter(|is_set| *is_set)?;
                    self.push(Token::Char('S'));
                }
                '%' => self.push(Token::Percent),
                '|' => self.push(Token::Char('|')),
                ',' | ';' | ':' | '!' | ' ' | '$' | '\n' | '>' | '(' | ')' | '[' | ']' | '"' => {}
                _ => return None,
            }
            self.skip(1 + c.len_utf8());
            return Some(());
        }
        let mut name = after[..letters].to_owned();
        for space in ["qquad", "quad"] {
            // `\quadx` without a space.
            if name.starts_with(space) {
                name = space.to_owned();
            }
        }
        self.skip(1 + name.len());
        self.named(&name)
    }

    fn named(&mut self, name: &str) -> Option<()> {
        let token = match name {
            "frac" | "dfrac" | "tfrac" | "cfrac" | "binom" | "dbinom" | "tbinom" => {
                self.is_argument();
                self.arguments.push((self.braces.len(), 2));
                Token::Command(
                    if name.contains("binom") {
                        "binom"
                    } else {
                        "frac"
                    }
                    .to_owned(),
                )
            }
            "sqrt" => {
                self.is_argument();
                let mut index = 2;
                if let Some(rest) = self.rest.trim_start().strip_prefix('[') {
                    let (inside, rest) = rest.split_once(']')?;
                    index = inside.trim().parse::<u16>().ok()?.into();
                    self.rest = rest;
                }
                self.arguments.push((self.braces.len(), 1));
                Token::Root(index)
            }
            "lbrace" => {
                self.braces.push(true);
                Token::Char('s')
            }
            "rbrace" => {
                self.braces.pop().filter(|is_set| *is_set)?;
                Token::Char('S')
            }
            "left" | "right" => {
                let rest = self.rest.trim_start();
                self.rest = rest.strip_prefix('.').unwrap_or(rest);
                return Some(());
            }
            "circ" | "degree" => {
                // Degrees are a unit.
                if self.tokens.last() == Some(&Token::Char('^')) {
                    self.tokens.pop();
                }
                return Some(());
            }
            "begin" | "end" => return self.environment(name == "begin"),
            "le" | "leq" | "leqslant" | "leqq" => Token::Relation(Relation::LessOrEqual),
            "ge" | "geq" | "geqslant" | "geqq" => Token::Relation(Relation::GreaterOrEqual),
            "lt" => Token::Relation(Relation::Less),
            "gt" => Token::Relation(Relation::Greater),
            "ne" | "neq" => Token::Relation(Relation::Unequal),
            "approx" | "equiv" | "simeq" => Token::Relation(Relation::Equal),
            "in" => Token::Relation(Relation::In),
            "cdot" | "times" | "ast" => Token::Char('*'),
            "div" | "colon" => Token::Char('/'),
            "lvert" | "rvert" | "vert" | "mid" => Token::Char('|'),
            "langle" => Token::Char('('),
            "rangle" => Token::Char(')'),
            "lbrack" => Token::Char('['),
            "rbrack" => Token::Char(']'),
            "land" | "lor" | "wedge" | "vee" => Token::And,
            "mathbb" if !self.group_is_value() => {
                let set = self.group_text()?;
                Token::Command(format!("mathbb {}", set.trim()))
            }
            "R" => Token::Command("mathbb R".to_owned()),
            "text" if self.rest.is_empty() => return None,
            _ if TEXT.contains(&name) => return self.text(name),
            // `\color{red} 2` is 2, and so is `\mathbb{2}`.
            "color" | "textcolor" => return self.group_text().map(|_| ()),
            "mathbb" => return Some(()),
            // A line over digits repeats them, which is no number without a point.
            "overline" | "bar" if self.group_is_value() => {
                let inside = self.group_text()?;
                return self.symbol(&format!("overline {}", inside.trim()));
            }
            // `\mathbf{2}` is 2.
            _ if STYLED.contains(&name) && self.group_is_value() => return Some(()),
            _ if STYLED.contains(&name) => {
                let inside = self.group_text()?;
                let inside: String = inside.chars().filter(|c| !c.is_whitespace()).collect();
                return self.symbol(&inside);
            }
            _ if SKIPPED.contains(&name) => return Some(()),
            _ if GREEK.contains(&name) => return self.symbol(name),
            "pi" | "infty" | "emptyset" | "varnothing" | "pm" | "mp" | "cup" | "sum" | "prod"
            | "int" | "lfloor" | "rfloor" | "lceil" | "rceil" | "lim" => {
                self.is_argument();
                Token::Command(name.to_owned())
            }
            _ if FUNCTIONS.contains(&name) => Token::Command(name.to_owned()),
            _ => return None,
        };
        self.push(token);
        Some(())
    }

    /// Returns true if a group in braces follows that begins like a number, or is nested.
    fn group_is_value(&self) -> bool {
        let inside = self.rest.trim_start().strip_prefix('{');
        let first = inside.and_then(|inside| inside.trim_start().chars().next());
        first.is_some_and(|c| c.is_ascii_digit() || "-+.(\\".contains(c))
    }

    fn environment(&mut self, begins: bool) -> Option<()> {
        let name = self.group_text()?;
        let name = name.trim().trim_end_matches('*');
        match name {
            "matrix" | "pmatrix" | "bmatrix" | "vmatrix" | "Bmatrix" | "array" | "smallmatrix" => {}
            "aligned" | "align" | "equation" | "gathered" | "split" => return Some(()),
            _ => return None,
        }
        if begins {
            if name == "array" && self.rest.trim_start().starts_with('{') {
                self.group_text()?;
            }
            self.matrices += 1;
            self.push(Token::Begin);
        } else {
            self.matrices = self.matrices.checked_sub(1)?;
            self.push(Token::End);
        }
        Some(())
    }

    /// Parses `\text{...}`: a separator, a percent sign, a unit, a variable or words.
    fn text(&mut self, command: &str) -> Option<()> {
        let inside = self.group_text()?;
        let trimmed = inside.trim().trim_matches(|c| c == '.' || c == ',');
        let lower = trimmed.trim().to_ascii_lowercase();
        let upright = matches!(command, "mathrm" | "operatorname");
        match lower.as_str() {
            "" => {}
            "and" | "or" => self.push(Token::And),
            "%" | "\\%" | "percent" | "percentage" => self.push(Token::Percent),
            _ if trimmed.chars().all(|c| c.is_ascii_digit()) => {
                let text = self.rest;
                self.rest = trimmed;
                self.number()?;
                self.rest = text;
            }
            _ if upright && FUNCTIONS.contains(&trimmed) => {
                self.push(Token::Command(trimmed.to_owned()));
            }
            _ if upright && trimmed.chars().count() == 1 => return self.symbol(trimmed),
            _ => {
                self.push(Token::Text(trimmed.to_owned()));
                self.unit_power();
            }
        }
        Some(())
    }
}
