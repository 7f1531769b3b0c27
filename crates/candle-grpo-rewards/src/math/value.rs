//! Answer values.

use num_traits::One;

use super::lexer::Relation;
use super::limits::Budget;
use super::polynomial::{Atom, Fraction};

/// An answer's value.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    /// A number or an expression.
    Scalar(Scalar),
    /// Ordered elements: `(1, 2, 3)`. Two elements may also be an open interval.
    Tuple(Vec<Value>),
    /// Unordered elements, in braces or separated by commas.
    Set(Vec<Value>),
    Interval(Box<Interval>),
    /// A union of intervals and sets.
    Union(Vec<Value>),
    Matrix(Vec<Vec<Scalar>>),
    /// Sides and the relations between them.
    Chain(Vec<Value>, Vec<Relation>),
    /// Words.
    Text(String),
}

/// A number or an expression.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Scalar {
    pub(super) exact: Fraction,
    /// True if a decimal number is part of it.
    pub(super) has_decimals: bool,
    /// True for a number with a percent sign.
    pub(super) is_percentage: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Interval {
    pub(super) from: Scalar,
    pub(super) to: Scalar,
    pub(super) has_from: bool,
    pub(super) has_to: bool,
}

impl Scalar {
    pub(super) fn new(exact: Fraction) -> Self {
        Self {
            exact,
            has_decimals: false,
            is_percentage: false,
        }
    }

    /// Returns an approximation if `has_decimals`.
    pub(super) fn with_decimals(mut self, has_decimals: bool) -> Self {
        self.has_decimals = has_decimals;
        self
    }

    /// Applies an operation to two scalars.
    pub(super) fn with(
        &self,
        other: &Self,
        operation: impl FnOnce(&Fraction, &Fraction) -> Option<Fraction>,
    ) -> Option<Self> {
        let result = Self::new(operation(&self.exact, &other.exact)?);
        Some(result.with_decimals(self.has_decimals || other.has_decimals))
    }

    pub(super) fn plus(&self, other: &Self, budget: &Budget) -> Option<Self> {
        self.with(other, |a, b| a.plus(b, budget))
    }

    pub(super) fn times(&self, other: &Self, budget: &Budget) -> Option<Self> {
        self.with(other, |a, b| a.times(b, budget))
    }

    /// Returns true if it has neither variables nor unknown functions.
    pub(super) fn is_constant(&self) -> bool {
        self.exact.real().is_some() || self.is_infinite()
    }

    pub(super) fn is_infinite(&self) -> bool {
        infinity().is_some_and(|infinity| {
            let negative = infinity.negated();
            self.exact == infinity || Some(&self.exact) == negative.as_ref()
        })
    }
}

/// Infinity is a symbol.
pub(super) fn infinity() -> Option<Fraction> {
    Fraction::symbol("infty")
}

impl Value {
    pub(super) fn integer(n: i64) -> Self {
        Self::Scalar(Scalar::new(Fraction::integer(n)))
    }

    pub(super) fn scalar(self) -> Option<Scalar> {
        match self {
            Self::Scalar(scalar) => Some(scalar),
            _ => None,
        }
    }

    pub(super) fn plus(self, other: Self, budget: &Budget) -> Option<Self> {
        match (self, other) {
            (Self::Scalar(a), Self::Scalar(b)) => Some(Self::Scalar(a.plus(&b, budget)?)),
            (Self::Matrix(a), Self::Matrix(b)) => {
                let same = a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| a.len() == b.len());
                let rows = a.iter().zip(&b).map(|(a, b)| {
                    let row = a.iter().zip(b).map(|(a, b)| a.plus(b, budget));
                    row.collect::<Option<Vec<_>>>()
                });
                same.then(|| Some(Self::Matrix(rows.collect::<Option<Vec<_>>>()?)))?
            }
            _ => None,
        }
    }

    pub(super) fn times(self, other: Self, budget: &Budget) -> Option<Self> {
        match (self, other) {
            (Self::Scalar(a), Self::Scalar(b)) => Some(Self::Scalar(a.times(&b, budget)?)),
            (Self::Scalar(a), Self::Matrix(rows)) | (Self::Matrix(rows), Self::Scalar(a)) => {
                let rows = rows.iter().map(|row| {
                    let row = row.iter().map(|x| a.times(x, budget));
                    row.collect::<Option<Vec<_>>>()
                });
                Some(Self::Matrix(rows.collect::<Option<Vec<_>>>()?))
            }
            (Self::Matrix(a), Self::Matrix(b)) => matrix_product(&a, &b, budget),
            _ => None,
        }
    }

    pub(super) fn negated(self, budget: &Budget) -> Option<Self> {
        let is_percentage = matches!(&self, Self::Scalar(scalar) if scalar.is_percentage);
        let mut negated = Self::integer(-1).times(self, budget)?;
        if let Self::Scalar(scalar) = &mut negated {
            scalar.is_percentage = is_percentage;
        }
        Some(negated)
    }

    /// Returns true if a side only names a value: a variable, `f(x)`, `AB`, `(p, q)`.
    pub(super) fn is_name(&self) -> bool {
        match self {
            Self::Scalar(scalar) => {
                let single = |polynomial: &super::polynomial::Polynomial| {
                    polynomial.single().is_some_and(|(monomial, coefficient)| {
                        let named = |atom: &Atom| matches!(atom, Atom::Symbol(_) | Atom::Call(..));
                        coefficient.is_one() && monomial.0.keys().all(|atom| named(atom))
                    })
                };
                single(&scalar.exact.numerator)
                    && single(&scalar.exact.denominator)
                    && scalar.exact.as_constant().is_none()
            }
            Self::Tuple(elements) => elements.iter().all(Self::is_name),
            Self::Text(_) => true,
            _ => false,
        }
    }
}

fn matrix_product(a: &[Vec<Scalar>], b: &[Vec<Scalar>], budget: &Budget) -> Option<Value> {
    if a.first()?.len() != b.len() {
        return None;
    }
    let entry = |row: &[Scalar], column: usize| {
        let zero = Scalar::new(Fraction::integer(0));
        row.iter().zip(b).try_fold(zero, |sum, (x, other)| {
            sum.plus(&x.times(other.get(column)?, budget)?, budget)
        })
    };
    let columns = b.first()?.len();
    let rows = a
        .iter()
        .map(|row| (0..columns).map(|column| entry(row, column)).collect());
    Some(Value::Matrix(rows.collect::<Option<_>>()?))
}
