//! Value equality.

use num_complex::Complex64;
use num_rational::BigRational;
use num_traits::{Signed, ToPrimitive};

use super::approximate::POINTS;
use super::lexer::Relation;
use super::limits::Budget;
use super::polynomial::{Atom, Fraction, Polynomial};
use super::value::{Interval, Scalar, Value, infinity};

/// Compares an answer's values with its reference's.
pub(super) struct Comparison {
    /// Decimal numbers are equal up to half a unit in this decimal place.
    pub(super) decimals: u32,
    budget: Budget,
}

impl Comparison {
    pub(super) fn new(decimals: u32) -> Self {
        Self {
            decimals,
            budget: Budget::new(),
        }
    }

    /// Returns true if the values are equal. The argument order does not matter.
    pub(super) fn equal(&self, a: &Value, b: &Value) -> bool {
        if self.budget.spend(10).is_none() {
            return false;
        }
        let is_chain = |value: &Value| matches!(value, Value::Chain(..));
        let (mut a, mut b) = (a.clone(), b.clone());
        if is_chain(&a) != is_chain(&b) {
            let is_region = |value: &Value| {
                matches!(
                    value,
                    Value::Interval(_) | Value::Union(_) | Value::Tuple(_)
                )
            };
            let other_is_region = is_region(if is_chain(&a) { &b } else { &a });
            for side in [&mut a, &mut b] {
                let Value::Chain(sides, relations) = &*side else {
                    continue;
                };
                let plain = assigned(sides, relations)
                    .or_else(|| other_is_region.then(|| region(sides, relations))?);
                match plain {
                    Some(plain) => *side = plain,
                    None => return false,
                }
            }
            return self.equal(&a, &b);
        }
        match (&a, &b) {
            (Value::Scalar(a), Value::Scalar(b)) => self.scalars(a, b),
            (Value::Tuple(a), Value::Tuple(b) | Value::Set(b))
            | (Value::Set(a), Value::Tuple(b))
                if a.len() == b.len() =>
            {
                a.iter().zip(b).all(|(a, b)| self.equal(a, b))
            }
            (Value::Set(a), Value::Set(b)) | (Value::Union(a), Value::Union(b)) => {
                let covers =
                    |a: &[Value], b: &[Value]| a.iter().all(|a| b.iter().any(|b| self.equal(a, b)));
                covers(a, b) && covers(b, a)
            }
            (Value::Set(one), other) | (other, Value::Set(one)) => match one.as_slice() {
                [one] => self.equal(one, other),
                _ => false,
            },
            (Value::Interval(a), Value::Interval(b)) => self.intervals(a, b),
            (Value::Interval(interval), Value::Tuple(pair))
            | (Value::Tuple(pair), Value::Interval(interval)) => match pair.as_slice() {
                [Value::Scalar(from), Value::Scalar(to)] => self.intervals(
                    interval,
                    &Interval {
                        from: from.clone(),
                        to: to.clone(),
                        has_from: false,
                        has_to: false,
                    },
                ),
                _ => false,
            },
            (Value::Matrix(a), Value::Matrix(b)) => {
                a.len() == b.len()
                    && a.iter().zip(b).all(|(a, b)| {
                        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| self.scalars(a, b))
                    })
            }
            (Value::Chain(a, p), Value::Chain(b, q)) => self.chains((a, p), (b, q)),
            _ => false,
        }
    }

    fn intervals(&self, a: &Interval, b: &Interval) -> bool {
        (a.has_from, a.has_to) == (b.has_from, b.has_to)
            && self.scalars(&a.from, &b.from)
            && self.scalars(&a.to, &b.to)
    }

    fn scalars(&self, a: &Scalar, b: &Scalar) -> bool {
        if a.exact == b.exact {
            return true;
        }
        let difference = a.exact.minus(&b.exact, &self.budget);
        if difference.is_some_and(|difference| difference.numerator.is_zero()) {
            return true;
        }
        if a.is_infinite() || b.is_infinite() {
            return false;
        }
        let has_decimals = a.has_decimals || b.has_decimals;
        if let (Some(x), Some(y)) = (a.exact.as_constant(), b.exact.as_constant()) {
            let percent = |percent: BigRational, plain: BigRational| {
                let whole = percent * BigRational::from_integer(100.into());
                whole.is_integer() && whole == plain
            };
            // `28%` is also written as `28`.
            return match (a.is_percentage, b.is_percentage) {
                (true, false) if percent(x.clone(), y.clone()) => true,
                (false, true) if percent(y.clone(), x.clone()) => true,
                _ => has_decimals && self.rounds((x - y).abs()),
            };
        }
        if has_decimals && let (Some(a), Some(b)) = (a.exact.real(), b.exact.real()) {
            let half = 0.5 * 10f64.powi(-(self.decimals as i32));
            return (a - b).abs() <= half;
        }
        self.budget.spend(100).is_some() && a.exact.is_near(&b.exact)
    }

    /// Returns true if a difference is at most half a unit in the last compared decimal place.
    fn rounds(&self, difference: BigRational) -> bool {
        let ten = BigRational::from_integer(10.into());
        let unit = num_traits::pow::Pow::pow(&ten, self.decimals);
        difference * unit * BigRational::from_integer(2.into())
            <= BigRational::from_integer(1.into())
    }

    fn chains(&self, a: (&[Value], &[Relation]), b: (&[Value], &[Relation])) -> bool {
        let (a, b) = (ascending(a.0, a.1), ascending(b.0, b.1));
        let pairwise = a.1 == b.1
            && a.0.len() == b.0.len()
            && a.0.iter().zip(&b.0).all(|(a, b)| self.equal(a, b));
        if pairwise {
            return true;
        }
        let ([Value::Scalar(p), Value::Scalar(q)], [Value::Scalar(r), Value::Scalar(s)]) =
            (a.0.as_slice(), b.0.as_slice())
        else {
            return false;
        };
        if a.1 != b.1 {
            return false;
        }
        let is_directed = matches!(a.1[0], Relation::Less | Relation::LessOrEqual);
        let difference = |a: &Scalar, b: &Scalar| a.exact.minus(&b.exact, &self.budget);
        let (Some(a), Some(b)) = (difference(p, q), difference(r, s)) else {
            return false;
        };
        self.budget.spend(200).is_some()
            && (!is_directed && same_zeros(&a, &b) || proportional(&a, &b, is_directed))
    }
}

/// Returns true if the numerators are equal up to a constant factor.
fn same_zeros(a: &Fraction, b: &Fraction) -> bool {
    let primitive = |polynomial: &Polynomial| {
        let mut content = polynomial.content();
        if polynomial.is_negative() {
            content = -content;
        }
        polynomial.scale(&content.recip())
    };
    let (a, b) = (primitive(&a.numerator), primitive(&b.numerator));
    a.is_some() && a == b
}

/// Returns true if the expressions have a constant quotient, positive if `directed`.
fn proportional(a: &Fraction, b: &Fraction, directed: bool) -> bool {
    let quotients: Vec<Complex64> = (0..POINTS)
        .map(|point| a.at(point) / b.at(point))
        .filter(|quotient| quotient.is_finite())
        .collect();
    let Some(first) = quotients.first() else {
        return false;
    };
    let constant = quotients
        .iter()
        .all(|x| (x - first).norm() <= 1e-10 * first.norm());
    quotients.len() > 1 && constant && first.norm() > 0. && (!directed || first.re > 0.)
}

/// Returns the value in an assignment such as `x = 5`, or in a computation such as `2 + 3 = 5`.
fn assigned(sides: &[Value], relations: &[Relation]) -> Option<Value> {
    if relations
        .iter()
        .any(|relation| *relation != Relation::Equal)
    {
        return None;
    }
    let is_constant = |side: &Value| matches!(side, Value::Scalar(scalar) if scalar.is_constant());
    let (first, last) = (sides.first()?, sides.last()?);
    (first.is_name() || sides.iter().all(is_constant)).then(|| last.clone())
}

/// Returns a chain that only uses `<`, `≤`, `=` and `≠`. If equations begin with a name, the result
/// has their first and last side.
fn ascending(sides: &[Value], relations: &[Relation]) -> (Vec<Value>, Vec<Relation>) {
    let (mut sides, mut relations) = (sides.to_vec(), relations.to_vec());
    if sides.len() > 2 && assigned(&sides, &relations).is_some() {
        sides.drain(1..sides.len() - 1);
        relations.truncate(1);
    }
    let falls =
        |relation: &Relation| matches!(relation, Relation::Greater | Relation::GreaterOrEqual);
    if relations.iter().all(falls) {
        sides.reverse();
        relations.reverse();
        for relation in &mut relations {
            *relation = match relation {
                Relation::Greater => Relation::Less,
                _ => Relation::LessOrEqual,
            };
        }
    }
    (sides, relations)
}

/// Returns the solutions to inequalities that bound one expression by numbers.
fn region(sides: &[Value], relations: &[Relation]) -> Option<Value> {
    let (sides, relations) = ascending(sides, relations);
    let closed = |relation: Relation| match relation {
        Relation::Less => Some(false),
        Relation::LessOrEqual => Some(true),
        _ => None,
    };
    let scalars: Vec<&Scalar> = sides
        .iter()
        .map(|side| match side {
            Value::Scalar(scalar) => Some(scalar),
            _ => None,
        })
        .collect::<Option<_>>()?;
    let (from, subject, to) = match scalars.as_slice() {
        [from, subject, to] if from.is_constant() && to.is_constant() => (
            ((*from).clone(), closed(relations[0])?),
            subject,
            ((*to).clone(), closed(relations[1])?),
        ),
        [subject, to] if to.is_constant() => (
            (Scalar::new(infinity()?.negated()?), false),
            subject,
            ((*to).clone(), closed(relations[0])?),
        ),
        [from, subject] if from.is_constant() => (
            ((*from).clone(), closed(relations[0])?),
            subject,
            (Scalar::new(infinity()?), false),
        ),
        _ => return None,
    };
    if subject.is_constant() {
        return None;
    }
    let interval = |from: &(Scalar, bool), to: &(Scalar, bool)| {
        Value::Interval(Box::new(Interval {
            from: from.0.clone(),
            to: to.0.clone(),
            has_from: from.1,
            has_to: to.1,
        }))
    };
    let positive = interval(&from, &to);
    if !is_absolute(subject) {
        return Some(positive);
    }
    if !from.0.exact.real().is_some_and(|from| from >= 0.) {
        return None;
    }
    let negated = |bound: &(Scalar, bool)| {
        let scalar = Scalar::new(bound.0.exact.negated()?);
        Some((scalar.with_decimals(bound.0.has_decimals), bound.1))
    };
    let negative = interval(&negated(&to)?, &negated(&from)?);
    Some(Value::Union(vec![negative, positive]))
}

fn is_absolute(scalar: &Scalar) -> bool {
    let term = scalar.exact.numerator.single();
    term.is_some_and(|(monomial, coefficient)| {
        let mut atoms = monomial.0.keys();
        let absolute = |atom: &Atom| matches!(atom, Atom::Call(name, _) if name == "abs");
        coefficient.to_f64() == Some(1.) && atoms.len() == 1 && atoms.all(|atom| absolute(atom))
    })
}
