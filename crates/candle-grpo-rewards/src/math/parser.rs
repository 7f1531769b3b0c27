//! The grammar for answers. Values are computed during parsing.

use num_rational::BigRational;

use super::functions::{binomial, call, opaque, power, root};
use super::lexer::{Relation, Token, tokens};
use super::limits::{Budget, MAX_DEPTH};
use super::polynomial::{Atom, Fraction};
use super::value::{Interval, Scalar, Value, infinity};

/// Returns an expression's value, or `None` if it is not understood or beyond a limit.
pub(super) fn parse(text: &str) -> Option<Value> {
    let budget = Budget::new();
    let tokens = tokens(text)?;
    let mut parser = Parser {
        tokens: &tokens,
        at: 0,
        depth: 0,
        negative: false,
        branched: false,
        budget: &budget,
    };
    while matches!(parser.tokens.last(), Some(Token::Char(',' | ';'))) {
        parser.tokens = &parser.tokens[..parser.tokens.len() - 1];
    }
    let value = parser.list()?;
    (parser.at == parser.tokens.len()).then_some(value)
}

struct Parser<'a> {
    tokens: &'a [Token],
    at: usize,
    depth: usize,
    /// True while the lower sign of `\pm` is read.
    negative: bool,
    /// True if there was a `\pm`.
    branched: bool,
    budget: &'a Budget,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<&'a Token> {
        self.tokens.get(self.at)
    }

    fn is(&self, c: char) -> bool {
        self.peek() == Some(&Token::Char(c))
    }

    fn take(&mut self, c: char) -> bool {
        let found = self.is(c);
        self.at += usize::from(found);
        found
    }

    fn is_command(&self, name: &str) -> bool {
        matches!(self.peek(), Some(Token::Command(command)) if command == name)
    }

    fn take_command(&mut self, name: &str) -> bool {
        let found = self.is_command(name);
        self.at += usize::from(found);
        found
    }

    fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        self.budget.spend(1)?;
        self.depth += 1;
        let value = (self.depth <= MAX_DEPTH).then(|| parse(self))?;
        self.depth -= 1;
        value
    }

    /// Parses elements between commas, `and`, `or`; with semicolons, lists of elements.
    fn list(&mut self) -> Option<Value> {
        let mut groups = vec![self.elements()?];
        while self.take(';') {
            groups.push(self.elements()?);
        }
        let mut values: Vec<Value> = match groups.len() {
            1 => groups.remove(0),
            _ => groups.into_iter().map(one_or_set).collect(),
        };
        match values.len() {
            1 => values.pop(),
            _ => Some(Value::Set(values)),
        }
    }

    fn elements(&mut self) -> Option<Vec<Value>> {
        let mut values = self.element()?;
        loop {
            let before = self.at;
            while self.take(',') || matches!(self.peek(), Some(Token::And)) && self.skip() {}
            if self.at == before {
                return Some(values);
            }
            values.extend(self.element()?);
        }
    }

    fn skip(&mut self) -> bool {
        self.at += 1;
        true
    }

    /// Parses a relation or a value, with both signs for `\pm`.
    fn element(&mut self) -> Option<Vec<Value>> {
        let (from, outer) = (self.at, (self.negative, self.branched));
        (self.negative, self.branched) = (false, false);
        let mut values = vec![self.nested(Self::chain)?];
        if self.branched {
            self.at = from;
            self.negative = true;
            values.push(self.nested(Self::chain)?);
        }
        (self.negative, self.branched) = outer;
        Some(values)
    }

    fn chain(&mut self) -> Option<Value> {
        let (mut sides, mut relations) = (vec![self.union()?], Vec::new());
        while let Some(Token::Relation(relation)) = self.peek() {
            self.at += 1;
            relations.push(*relation);
            sides.push(self.union()?);
        }
        if relations.is_empty() {
            return sides.pop();
        }
        // `x \in S` is the set.
        if relations == [Relation::In] {
            return sides.pop();
        }
        Some(Value::Chain(sides, relations))
    }

    fn union(&mut self) -> Option<Value> {
        let first = self.sum()?;
        if !self.is_command("cup") {
            return Some(first);
        }
        let mut parts = vec![as_interval(first)?];
        while self.take_command("cup") {
            parts.push(as_interval(self.sum()?)?);
        }
        Some(Value::Union(parts))
    }

    fn sum(&mut self) -> Option<Value> {
        let mut sum: Option<Value> = None;
        loop {
            let sign = match self.peek() {
                Some(Token::Char('+')) => 1,
                Some(Token::Char('-')) => -1,
                Some(Token::Command(name)) if name == "pm" || name == "mp" => {
                    self.branched = true;
                    if self.negative == (name == "pm") {
                        -1
                    } else {
                        1
                    }
                }
                _ if sum.is_none() => 0,
                _ => return sum,
            };
            self.at += usize::from(sign != 0);
            let mut term = self.product()?;
            if sign < 0 {
                term = term.negated(self.budget)?;
            }
            sum = Some(match sum {
                Some(sum) => sum.plus(term, self.budget)?,
                None => term,
            });
        }
    }

    fn product(&mut self) -> Option<Value> {
        let mut product = self.signed()?;
        loop {
            if self.take('*') {
                product = product.times(self.signed()?, self.budget)?;
            } else if self.take('/') || self.take(':') {
                let divisor = self.signed()?.scalar()?;
                let one = Scalar::new(Fraction::integer(1));
                let inverse = one.with(&divisor, |a, b| a.over(b, self.budget))?;
                product = product.times(Value::Scalar(inverse), self.budget)?;
            } else if self.take_quotient_of_units() {
            } else if self.starts_factor() {
                let mixed = self.is_mixed();
                let factor = self.power()?;
                product = if mixed {
                    product.plus(factor, self.budget)?
                } else {
                    product.times(factor, self.budget)?
                };
            } else {
                // A unit.
                while matches!(self.peek(), Some(Token::Text(_))) {
                    self.at += 1;
                }
                return Some(product);
            }
        }
    }

    /// Consumes `\frac{\text{km}}{\text{h}}`.
    fn take_quotient_of_units(&mut self) -> bool {
        let found = match self.tokens.get(self.at..) {
            Some(
                [
                    Token::Command(name),
                    Token::Char('{'),
                    Token::Text(_),
                    Token::Char('}'),
                    Token::Char('{'),
                    Token::Text(_),
                    Token::Char('}'),
                    ..,
                ],
            ) => name == "frac",
            _ => false,
        };
        self.at += if found { 7 } else { 0 };
        found
    }

    /// Parses a factor with signs before it, as after `\cdot`.
    fn signed(&mut self) -> Option<Value> {
        if self.take('-') {
            return self.nested(Self::signed)?.negated(self.budget);
        }
        if self.take('+') {
            return self.nested(Self::signed);
        }
        self.power()
    }

    /// Returns true if a factor follows without a multiplication sign.
    fn starts_factor(&self) -> bool {
        match self.peek() {
            Some(Token::Symbol(_) | Token::Root(_) | Token::Begin) => true,
            // Two numbers side by side are not a product.
            Some(Token::Number(..)) => !matches!(
                self.at.checked_sub(1).and_then(|at| self.tokens.get(at)),
                Some(Token::Number(..))
            ),
            Some(Token::Char(c)) => matches!(c, '(' | '{'),
            Some(Token::Command(name)) => {
                !matches!(name.as_str(), "pm" | "mp" | "cup" | "rfloor" | "rceil")
            }
            _ => false,
        }
    }

    /// Returns true at the fraction in a mixed number: `2\frac{1}{3}`.
    fn is_mixed(&self) -> bool {
        let whole = |token: Option<&Token>| match token {
            Some(Token::Number(x, true)) => Some(x.clone()),
            _ => None,
        };
        let before = self.at.checked_sub(1).and_then(|at| self.tokens.get(at));
        if whole(before).is_none() || !self.is_command("frac") {
            return false;
        }
        let mut numbers = Vec::new();
        let mut at = self.at + 1;
        for _ in 0..2 {
            let braced = self.tokens.get(at) == Some(&Token::Char('{'));
            at += usize::from(braced);
            numbers.extend(whole(self.tokens.get(at)));
            at += 1;
            if braced && self.tokens.get(at) != Some(&Token::Char('}')) {
                return false;
            }
            at += usize::from(braced);
        }
        matches!(numbers.as_slice(), [a, b] if a < b)
    }

    fn power(&mut self) -> Option<Value> {
        let mut base = self.nested(Self::primary)?;
        loop {
            if self.take('!') {
                base = Value::Scalar(self.apply("factorial", base.scalar()?)?);
            } else if self.peek() == Some(&Token::Percent) {
                self.at += 1;
                let percent = BigRational::new(1.into(), 100.into());
                let percent = Scalar::new(Fraction::constant(percent));
                let mut scalar = base.scalar()?.times(&percent, self.budget)?;
                scalar.is_percentage = scalar.exact.as_constant().is_some();
                base = Value::Scalar(scalar);
            } else if self.take('^') {
                // `^{\circ}` is a unit, which the lexer drops.
                let empty = self.is('{') && self.tokens.get(self.at + 1) == Some(&Token::Char('}'));
                if empty {
                    self.at += 2;
                    continue;
                }
                let exponent = self.nested(Self::exponent)?.scalar()?;
                base = self.raise(base, &exponent)?;
            } else {
                return Some(base);
            }
        }
    }

    fn exponent(&mut self) -> Option<Value> {
        if self.take('-') {
            return self.nested(Self::exponent)?.negated(self.budget);
        }
        if self.take('+') {
            return self.nested(Self::exponent);
        }
        let base = self.nested(Self::primary)?;
        if self.take('^') {
            let exponent = self.nested(Self::exponent)?.scalar()?;
            return self.raise(base, &exponent);
        }
        Some(base)
    }

    fn raise(&self, base: Value, exponent: &Scalar) -> Option<Value> {
        if let Value::Matrix(_) = &base {
            let n = exponent
                .exact
                .as_integer()
                .filter(|n| (1..=8).contains(n))?;
            let mut product = base.clone();
            for _ in 1..n {
                product = product.times(base.clone(), self.budget)?;
            }
            return Some(product);
        }
        let raised = base.scalar()?;
        let raised = raised.with(exponent, |base, e| power(base, e, self.budget))?;
        Some(Value::Scalar(raised))
    }

    fn apply(&self, name: &str, argument: Scalar) -> Option<Scalar> {
        let exact = call(name, &argument.exact, self.budget)?;
        Some(Scalar::new(exact).with_decimals(argument.has_decimals))
    }

    fn primary(&mut self) -> Option<Value> {
        let token = self.peek()?;
        self.at += 1;
        match token {
            Token::Number(number, whole) => {
                let number = Scalar::new(Fraction::constant(number.clone()));
                Some(Value::Scalar(number.with_decimals(!whole)))
            }
            Token::Symbol(name) => self.symbol(name),
            Token::Root(index) => {
                let radicand = self.argument()?;
                let root = Scalar::new(root(&radicand.exact, *index, self.budget)?);
                Some(Value::Scalar(root.with_decimals(radicand.has_decimals)))
            }
            Token::Command(name) => self.command(name),
            Token::Char('{') => {
                let value = self.list()?;
                self.take('}').then_some(value)
            }
            Token::Char('s') => {
                if self.take('S') {
                    return Some(Value::Set(Vec::new()));
                }
                let value = self.list()?;
                self.take('S').then(|| match value {
                    Value::Set(_) => value,
                    value => Value::Set(vec![value]),
                })
            }
            Token::Char(open @ ('(' | '[')) => self.brackets(*open),
            Token::Char('|') => {
                let inside = self.sum()?.scalar()?;
                self.take('|').then_some(())?;
                Some(Value::Scalar(self.apply("abs", inside)?))
            }
            Token::Begin => self.matrix(),
            Token::Text(text) => Some(Value::Text(text.clone())),
            _ => None,
        }
    }

    /// Parses a variable, or one of the functions `f`, `g` and `h` with arguments in brackets.
    fn symbol(&mut self, name: &str) -> Option<Value> {
        let exact = match name {
            "e" => Fraction::atom(Atom::Euler)?,
            "i" | "imath" => Fraction::atom(Atom::Imaginary)?,
            _ if self.is('(') && name.starts_with(['f', 'g', 'h', 'F', 'G', 'H']) => {
                self.at += 1;
                let mut arguments = vec![self.sum()?.scalar()?.exact];
                while self.take(',') {
                    arguments.push(self.sum()?.scalar()?.exact);
                }
                self.take(')').then_some(())?;
                opaque(name, arguments)?
            }
            _ => Fraction::symbol(name)?,
        };
        Some(Value::Scalar(Scalar::new(exact)))
    }

    /// Parses `{...}` or one factor.
    fn argument(&mut self) -> Option<Scalar> {
        self.nested(Self::primary)?.scalar()
    }

    fn command(&mut self, name: &str) -> Option<Value> {
        let exact = match name {
            "pi" => Fraction::atom(Atom::Pi)?,
            "infty" => infinity()?,
            "emptyset" | "varnothing" => return Some(Value::Set(Vec::new())),
            "mathbb R" => {
                return Some(Value::Interval(Box::new(Interval {
                    from: Scalar::new(infinity()?.negated()?),
                    to: Scalar::new(infinity()?),
                    has_from: false,
                    has_to: false,
                })));
            }
            "frac" | "binom" => {
                let (a, b) = (self.argument()?, self.argument()?);
                let result = a.with(&b, |a, b| match name {
                    "frac" => a.over(b, self.budget),
                    _ => binomial(a, b, self.budget),
                });
                return Some(Value::Scalar(result?));
            }
            "lfloor" | "lceil" => {
                let inside = self.sum()?.scalar()?;
                let (end, function) = match name {
                    "lfloor" => ("rfloor", "floor"),
                    _ => ("rceil", "ceil"),
                };
                self.take_command(end).then_some(())?;
                return Some(Value::Scalar(self.apply(function, inside)?));
            }
            "sum" | "prod" | "int" | "lim" => return self.big_operator(name),
            "rfloor" | "rceil" | "pm" | "mp" | "cup" => return None,
            _ if name.starts_with("mathbb") => Fraction::symbol(name)?,
            _ => return self.function(name),
        };
        Some(Value::Scalar(Scalar::new(exact)))
    }

    /// Parses a sum, product, integral or limit, whose bounds and body are compared.
    fn big_operator(&mut self, name: &str) -> Option<Value> {
        let mut arguments = Vec::new();
        for mark in ['_', '^'] {
            if matches!(self.peek(), Some(Token::Symbol(bound)) if mark == '_' && bound.starts_with('_'))
            {
                let Some(Token::Symbol(bound)) = self.peek() else {
                    return None;
                };
                arguments.push(Fraction::symbol(bound)?);
                self.at += 1;
            } else if mark == '^' && self.take('^') {
                arguments.push(self.argument()?.exact);
            }
        }
        let body = self.nested(Self::product)?.scalar()?;
        arguments.push(body.exact);
        let operator = Scalar::new(opaque(name, arguments)?);
        Some(Value::Scalar(operator.with_decimals(body.has_decimals)))
    }

    /// Parses a function with its power and base: `\sin^2 x`, `\log_2 8`.
    fn function(&mut self, name: &str) -> Option<Value> {
        let mut base = None;
        if let Some(Token::Symbol(subscript)) = self.peek()
            && let Some(written) = subscript.strip_prefix('_')
        {
            self.at += 1;
            base = Some(match written.parse::<i64>() {
                Ok(n) => Fraction::integer(n),
                Err(_) if written == "e" => Fraction::atom(Atom::Euler)?,
                Err(_) => Fraction::symbol(written)?,
            });
        }
        let mut exponent = None;
        if self.take('^') {
            exponent = Some(self.nested(Self::exponent)?.scalar()?);
        }
        let inverse = exponent.as_ref().and_then(|e| e.exact.as_integer()) == Some(-1);
        let argument = match self.peek()? {
            Token::Char('(') => match self.nested(Self::primary)? {
                Value::Tuple(elements) => {
                    let arguments = elements
                        .into_iter()
                        .map(|value| Some(value.scalar()?.exact));
                    let arguments = arguments.collect::<Option<Vec<_>>>()?;
                    return Some(Value::Scalar(Scalar::new(opaque(name, arguments)?)));
                }
                value => value.scalar()?,
            },
            _ => self.bare_argument()?,
        };
        let result = match base {
            Some(base) => {
                let ln = self.apply("ln", argument)?;
                let base = Scalar::new(call("ln", &base, self.budget)?);
                ln.with(&base, |a, b| a.over(b, self.budget))?
            }
            None if inverse => {
                return Some(Value::Scalar(self.apply(&format!("arc{name}"), argument)?));
            }
            None => self.apply(name, argument)?,
        };
        match exponent {
            Some(exponent) => self.raise(Value::Scalar(result), &exponent),
            None => Some(Value::Scalar(result)),
        }
    }

    /// Parses the factors after a function, up to the next function or operator.
    fn bare_argument(&mut self) -> Option<Scalar> {
        let negative = self.take('-');
        let mut product = self.power()?;
        while self.starts_factor() && !self.is('(') {
            if let Some(Token::Command(name)) = self.peek()
                && !matches!(name.as_str(), "pi" | "frac")
            {
                break;
            }
            product = product.times(self.power()?, self.budget)?;
        }
        if negative {
            product = product.negated(self.budget)?;
        }
        product.scalar()
    }

    /// Parses a group, a tuple, an interval or a matrix in brackets.
    fn brackets(&mut self, open: char) -> Option<Value> {
        let mut elements = self.element()?;
        while self.take(',') || self.take(';') {
            elements.extend(self.element()?);
        }
        let closed = match self.peek()? {
            Token::Char(']') => true,
            Token::Char(')') => false,
            _ => return None,
        };
        self.at += 1;
        let opened = open == '[';
        match elements.len() {
            1 if opened == closed => elements.pop(),
            2 if opened || closed => {
                let to = elements.pop()?.scalar()?;
                let from = elements.pop()?.scalar()?;
                Some(Value::Interval(Box::new(Interval {
                    from,
                    to,
                    has_from: opened,
                    has_to: closed,
                })))
            }
            _ if opened == closed => Some(Value::Tuple(elements)),
            _ => None,
        }
    }

    fn matrix(&mut self) -> Option<Value> {
        let mut rows = vec![Vec::new()];
        loop {
            match self.peek()? {
                Token::End => {
                    self.at += 1;
                    break;
                }
                Token::Row => {
                    self.at += 1;
                    rows.push(Vec::new());
                }
                Token::Char('&') => self.at += 1,
                _ => {
                    let entry = self.nested(Self::sum)?.scalar()?;
                    rows.last_mut()?.push(entry);
                }
            }
        }
        rows.retain(|row| !row.is_empty());
        let width = rows.first()?.len();
        rows.iter()
            .all(|row| row.len() == width)
            .then_some(Value::Matrix(rows))
    }
}

fn one_or_set(mut values: Vec<Value>) -> Value {
    match (values.len(), values.pop()) {
        (1, Some(value)) => value,
        (_, last) => Value::Set(values.into_iter().chain(last).collect()),
    }
}

/// Returns a part of a union. There, a pair is an open interval.
fn as_interval(value: Value) -> Option<Value> {
    match value {
        Value::Tuple(elements) => {
            let [from, to] = <[Value; 2]>::try_from(elements).ok()?;
            Some(Value::Interval(Box::new(Interval {
                from: from.scalar()?,
                to: to.scalar()?,
                has_from: false,
                has_to: false,
            })))
        }
        Value::Set(_) | Value::Interval(_) => Some(value),
        _ => None,
    }
}
