//! Sums whose terms are products of atom powers, with rational coefficients.

use std::collections::BTreeMap;
use std::sync::Arc;

use num_bigint::BigInt;
use num_integer::Integer;
use num_rational::{BigRational, Ratio};
use num_traits::{One, Signed, ToPrimitive, Zero};

use super::limits::{Budget, MAX_BITS, MAX_EXPONENT, MAX_TERMS, MAX_WEIGHT};

/// An atom's exponent.
pub(super) type Exponent = Ratio<i64>;

/// A factor that is not divided further.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Atom {
    /// The imaginary unit.
    Imaginary,
    /// A prime, or a number without small divisors. Its exponent is in `[0, 1)`, unless the power
    /// is too large to compute.
    Prime(BigInt),
    /// The base for natural logarithms.
    Euler,
    Pi,
    /// A variable.
    Symbol(String),
    /// A sum with several terms under a root. Its exponent is in `(0, 1)`.
    Sum(Polynomial),
    /// An atom raised to a product, such as `2^x`.
    Power(Arc<Atom>, Monomial),
    /// A function with canonical arguments.
    Call(String, Vec<Fraction>),
}

impl Atom {
    /// Counts the atoms in it.
    fn weight(&self) -> usize {
        match self {
            Self::Sum(sum) => 1 + sum.weight(),
            Self::Power(base, exponent) => 1 + base.weight() + exponent.weight(),
            Self::Call(_, arguments) => 1 + arguments.iter().map(Fraction::weight).sum::<usize>(),
            _ => 1,
        }
    }
}

/// A product of atom powers.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Monomial(pub(super) BTreeMap<Arc<Atom>, Exponent>);

/// A sum of monomials with nonzero coefficients.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Polynomial(pub(super) BTreeMap<Monomial, BigRational>);

/// A quotient of two polynomials. The denominator is 1, or has several terms.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Fraction {
    pub(super) numerator: Polynomial,
    pub(super) denominator: Polynomial,
}

pub(super) fn within_bits(x: &BigRational) -> Option<()> {
    (x.numer().bits() <= MAX_BITS && x.denom().bits() <= MAX_BITS).then_some(())
}

pub(super) fn within_exponent(exponent: Exponent) -> Option<()> {
    let bounded = exponent.numer().unsigned_abs() <= MAX_EXPONENT.unsigned_abs();
    (bounded && *exponent.denom() <= MAX_EXPONENT).then_some(())
}

/// Raises `base` to an integer power. Returns `None` if the result has too many bits or divides
/// by 0.
pub(super) fn integer_power(base: &BigRational, exponent: i64) -> Option<BigRational> {
    if base.is_zero() && exponent < 0 {
        return None;
    }
    let bits = base.numer().bits().max(base.denom().bits()).max(1);
    let trivial = base.is_zero() || base.abs().is_one();
    if !trivial && bits.saturating_mul(exponent.unsigned_abs()) > MAX_BITS {
        return None;
    }
    let exponent = if trivial {
        (exponent % 2 + 2) as i32 * exponent.signum() as i32
    } else {
        i32::try_from(exponent).ok()?
    };
    Some(num_traits::pow::Pow::pow(base, exponent))
}

impl Monomial {
    fn weight(&self) -> usize {
        self.0.keys().map(|atom| atom.weight()).sum()
    }

    /// Multiplies by `atom^exponent`. Returns the factor that became a number.
    fn multiply_power(&mut self, atom: &Arc<Atom>, exponent: Exponent) -> Option<BigRational> {
        let old = self.0.remove(atom).unwrap_or_default();
        let numerator = old
            .numer()
            .checked_mul(*exponent.denom())?
            .checked_add(exponent.numer().checked_mul(*old.denom())?)?;
        let mut exponent = Ratio::new(numerator, old.denom().checked_mul(*exponent.denom())?);
        within_exponent(exponent)?;
        let mut factor = BigRational::one();
        match atom.as_ref() {
            Atom::Prime(prime) => {
                let whole = exponent.numer().div_floor(exponent.denom());
                let prime = BigRational::from_integer(prime.clone());
                if let Some(power) = integer_power(&prime, whole) {
                    factor = power;
                    exponent -= whole;
                }
            }
            Atom::Imaginary if exponent.is_integer() => {
                let quarter = exponent.numer().rem_euclid(4);
                if quarter >= 2 {
                    factor = -factor;
                }
                exponent = Ratio::from_integer(quarter % 2);
            }
            _ => {}
        }
        if !exponent.is_zero() {
            self.0.insert(atom.clone(), exponent);
        }
        Some(factor)
    }
}

impl Polynomial {
    pub(super) fn constant(x: BigRational) -> Self {
        Self::term(Monomial::default(), x)
    }

    pub(super) fn one() -> Self {
        Self::constant(BigRational::one())
    }

    pub(super) fn term(monomial: Monomial, coefficient: BigRational) -> Self {
        let mut sum = Self::default();
        sum.add_term(monomial, coefficient);
        sum
    }

    /// Returns the atom raised to a number.
    pub(super) fn atom(atom: Atom, exponent: Exponent) -> Option<Self> {
        let mut monomial = Monomial::default();
        let factor = monomial.multiply_power(&Arc::new(atom), exponent)?;
        Some(Self::term(monomial, factor))
    }

    pub(super) fn is_zero(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn as_constant(&self) -> Option<BigRational> {
        if self.is_zero() {
            return Some(BigRational::zero());
        }
        let (monomial, coefficient) = self.single()?;
        monomial.0.is_empty().then(|| coefficient.clone())
    }

    /// Returns the only term.
    pub(super) fn single(&self) -> Option<(&Monomial, &BigRational)> {
        (self.0.len() == 1).then(|| self.0.first_key_value())?
    }

    fn weight(&self) -> usize {
        self.0.keys().map(|monomial| 1 + monomial.weight()).sum()
    }

    fn add_term(&mut self, monomial: Monomial, coefficient: BigRational) {
        use std::collections::btree_map::Entry;
        if coefficient.is_zero() {
            return;
        }
        match self.0.entry(monomial) {
            Entry::Vacant(entry) => {
                entry.insert(coefficient);
            }
            Entry::Occupied(mut entry) => {
                *entry.get_mut() += coefficient;
                if entry.get().is_zero() {
                    entry.remove();
                }
            }
        }
    }

    pub(super) fn plus(&self, other: &Self, budget: &Budget) -> Option<Self> {
        budget.spend(1)?;
        let mut sum = self.clone();
        for (monomial, coefficient) in &other.0 {
            budget.spend(1 + coefficient.numer().bits() as usize / 512)?;
            sum.add_term(monomial.clone(), coefficient.clone());
        }
        let bounded = sum.0.len() <= MAX_TERMS && sum.weight() <= 8 * MAX_WEIGHT;
        sum.0.values().try_for_each(within_bits)?;
        bounded.then_some(sum)
    }

    pub(super) fn scale(&self, factor: &BigRational) -> Option<Self> {
        let mut scaled = Self::default();
        for (monomial, coefficient) in &self.0 {
            let coefficient = coefficient * factor;
            within_bits(&coefficient)?;
            scaled.add_term(monomial.clone(), coefficient);
        }
        Some(scaled)
    }

    pub(super) fn times(&self, other: &Self, budget: &Budget) -> Option<Self> {
        let mut product = Self::default();
        for (a, x) in &self.0 {
            for (b, y) in &other.0 {
                let coefficient = x * y;
                within_bits(&coefficient)?;
                budget.spend(1 + coefficient.numer().bits() as usize / 512)?;
                let (monomial, factor, roots) = multiply(a, b)?;
                budget.spend(monomial.0.len())?;
                let mut term = Self::term(monomial, coefficient * factor);
                for root in &roots {
                    term = term.times(root, budget)?;
                }
                for (monomial, coefficient) in term.0 {
                    within_bits(&coefficient)?;
                    product.add_term(monomial, coefficient);
                }
                (product.0.len() <= MAX_TERMS).then_some(())?;
            }
        }
        (product.weight() <= 8 * MAX_WEIGHT).then_some(product)
    }

    /// Returns the positive rational number that divides all coefficients so that they become
    /// integers without a common divisor.
    pub(super) fn content(&self) -> BigRational {
        let mut numerator = BigInt::zero();
        let mut denominator = BigInt::one();
        for coefficient in self.0.values() {
            numerator = numerator.gcd(coefficient.numer());
            denominator = denominator.lcm(coefficient.denom());
            if denominator.bits() > 4 * MAX_BITS {
                return BigRational::one();
            }
        }
        if numerator.is_zero() {
            return BigRational::one();
        }
        BigRational::new(numerator, denominator)
    }

    /// Returns true if the last term's coefficient is negative.
    pub(super) fn is_negative(&self) -> bool {
        let last = self.0.last_key_value();
        last.is_some_and(|(_, coefficient)| coefficient.is_negative())
    }
}

/// Multiplies monomials. Returns their product, a number, and sums whose roots became whole.
fn multiply(a: &Monomial, b: &Monomial) -> Option<(Monomial, BigRational, Vec<Polynomial>)> {
    let (mut product, mut factor, mut roots) = (a.clone(), BigRational::one(), Vec::new());
    for (atom, exponent) in &b.0 {
        factor *= product.multiply_power(atom, *exponent)?;
        if let Atom::Sum(sum) = atom.as_ref()
            && let Some(exponent) = product.0.get_mut(atom)
            && *exponent >= Exponent::one()
        {
            roots.push(sum.clone());
            *exponent -= 1;
            if exponent.is_zero() {
                product.0.remove(atom);
            }
        }
    }
    within_bits(&factor)?;
    Some((product, factor, roots))
}

impl Fraction {
    pub(super) fn new(numerator: Polynomial) -> Self {
        Self {
            numerator,
            denominator: Polynomial::one(),
        }
    }

    pub(super) fn constant(x: BigRational) -> Self {
        Self::new(Polynomial::constant(x))
    }

    pub(super) fn integer(n: i64) -> Self {
        Self::constant(BigRational::from_integer(n.into()))
    }

    pub(super) fn atom(atom: Atom) -> Option<Self> {
        let weight = atom.weight();
        let atom = Polynomial::atom(atom, Exponent::one())?;
        (weight <= MAX_WEIGHT).then(|| Self::new(atom))
    }

    pub(super) fn symbol(name: &str) -> Option<Self> {
        Self::atom(Atom::Symbol(name.to_owned()))
    }

    fn weight(&self) -> usize {
        self.numerator.weight() + self.denominator.weight()
    }

    pub(super) fn as_constant(&self) -> Option<BigRational> {
        let one = self.denominator.as_constant().is_some();
        one.then(|| self.numerator.as_constant())?
    }

    pub(super) fn as_integer(&self) -> Option<i64> {
        let constant = self.as_constant()?;
        constant.is_integer().then(|| constant.to_i64())?
    }

    pub(super) fn plus(&self, other: &Self, budget: &Budget) -> Option<Self> {
        if self.denominator == other.denominator {
            let sum = self.numerator.plus(&other.numerator, budget)?;
            return Self::quotient(sum, self.denominator.clone(), budget);
        }
        let left = self.numerator.times(&other.denominator, budget)?;
        let right = other.numerator.times(&self.denominator, budget)?;
        let denominator = self.denominator.times(&other.denominator, budget)?;
        Self::quotient(left.plus(&right, budget)?, denominator, budget)
    }

    pub(super) fn negated(&self) -> Option<Self> {
        Some(Self {
            numerator: self.numerator.scale(&-BigRational::one())?,
            denominator: self.denominator.clone(),
        })
    }

    pub(super) fn minus(&self, other: &Self, budget: &Budget) -> Option<Self> {
        self.plus(&other.negated()?, budget)
    }

    pub(super) fn times(&self, other: &Self, budget: &Budget) -> Option<Self> {
        let numerator = self.numerator.times(&other.numerator, budget)?;
        let denominator = self.denominator.times(&other.denominator, budget)?;
        Self::quotient(numerator, denominator, budget)
    }

    pub(super) fn over(&self, other: &Self, budget: &Budget) -> Option<Self> {
        let numerator = self.numerator.times(&other.denominator, budget)?;
        let denominator = self.denominator.times(&other.numerator, budget)?;
        Self::quotient(numerator, denominator, budget)
    }

    /// Returns a quotient, or `None` if the denominator is 0.
    fn quotient(numerator: Polynomial, denominator: Polynomial, budget: &Budget) -> Option<Self> {
        if denominator.is_zero() {
            return None;
        }
        if numerator.is_zero() {
            return Some(Self::integer(0));
        }
        if numerator == denominator {
            return Some(Self::integer(1));
        }
        if let Some((monomial, coefficient)) = denominator.single() {
            if monomial.0.is_empty() {
                return Some(Self::new(numerator.scale(&coefficient.recip())?));
            }
            let (inverse, sums) = inverse(monomial, coefficient)?;
            let numerator = numerator.times(&inverse, budget)?;
            return if sums.is_empty() {
                Some(Self::new(numerator))
            } else {
                let mut denominator = Polynomial::one();
                for sum in &sums {
                    denominator = denominator.times(sum, budget)?;
                }
                Self::quotient(numerator, denominator, budget)
            };
        }
        let mut content = denominator.content();
        if denominator.is_negative() {
            content = -content;
        }
        let content = content.recip();
        let (numerator, denominator) = (numerator.scale(&content)?, denominator.scale(&content)?);
        // Sums cancel if they differ only in a constant factor.
        let mut own = numerator.content();
        if numerator.is_negative() {
            own = -own;
        }
        if numerator.scale(&own.recip())? == denominator {
            return Some(Self::constant(own));
        }
        Some(Self {
            numerator,
            denominator,
        })
    }
}

/// Returns a term's inverse, with the sums that remain in the denominator: `1 / s^(1/3)` is
/// `s^(2/3) / s`.
fn inverse(
    monomial: &Monomial,
    coefficient: &BigRational,
) -> Option<(Polynomial, Vec<Polynomial>)> {
    let (mut result, mut factor, mut sums) = (Monomial::default(), coefficient.recip(), Vec::new());
    for (atom, exponent) in &monomial.0 {
        let mut exponent = -*exponent;
        if let Atom::Sum(sum) = atom.as_ref() {
            sums.push(sum.clone());
            exponent += 1;
        }
        factor *= result.multiply_power(atom, exponent)?;
    }
    within_bits(&factor)?;
    Some((Polynomial::term(result, factor), sums))
}
