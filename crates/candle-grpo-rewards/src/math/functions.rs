//! Powers, roots and named functions in canonical form.

use std::sync::Arc;

use num_bigint::BigInt;
use num_integer::Integer;
use num_rational::{BigRational, Ratio};
use num_traits::{One, Signed, ToPrimitive, Zero};

use super::limits::{Budget, MAX_BITS, MAX_EXPANDED_POWER, MAX_FACTORIAL, MAX_TRIAL_DIVISOR};
use super::polynomial::{
    Atom, Exponent, Fraction, Monomial, Polynomial, integer_power, within_exponent,
};

/// Returns a positive number's prime factors. A factor without small divisors stays whole.
fn factorize(n: &BigInt, budget: &Budget) -> Option<Vec<(BigInt, i64)>> {
    let mut factors = Vec::new();
    let mut rest = n.clone();
    let mut divisor = 2u64;
    while !rest.is_one() && divisor <= MAX_TRIAL_DIVISOR {
        if rest.to_u64().is_some_and(|rest| divisor * divisor > rest) {
            break;
        }
        let mut count = 0;
        while (&rest % divisor).is_zero() {
            rest /= divisor;
            count += 1;
        }
        if count > 0 {
            factors.push((BigInt::from(divisor), count));
        }
        divisor += if divisor == 2 { 1 } else { 2 };
    }
    budget.spend(1 + (divisor / 2 * (1 + n.bits() / 256) / 500) as usize)?;
    if !rest.is_one() {
        let root = rest.sqrt();
        if &root * &root == rest {
            factors.push((root, 2))
        } else {
            factors.push((rest, 1))
        }
    }
    Some(factors)
}

/// Returns `base^exponent`.
pub(super) fn power(base: &Fraction, exponent: &Fraction, budget: &Budget) -> Option<Fraction> {
    budget.spend(1)?;
    match exponent.as_constant() {
        Some(exponent) => {
            let numerator = exponent.numer().to_i64()?;
            let exponent = Ratio::new_raw(numerator, exponent.denom().to_i64()?);
            within_exponent(exponent)?;
            rational_power(base, exponent, budget)
        }
        None => symbolic_power(base, exponent, budget),
    }
}

fn rational_power(base: &Fraction, exponent: Exponent, budget: &Budget) -> Option<Fraction> {
    if exponent.is_zero() {
        return Some(Fraction::integer(1));
    }
    if exponent < Exponent::zero() {
        let power = rational_power(base, -exponent, budget)?;
        return Fraction::integer(1).over(&power, budget);
    }
    let numerator = polynomial_power(&base.numerator, exponent, budget)?;
    if base.denominator.as_constant().is_some() {
        return Some(numerator);
    }
    numerator.over(
        &polynomial_power(&base.denominator, exponent, budget)?,
        budget,
    )
}

/// Raises a polynomial to a positive power.
fn polynomial_power(base: &Polynomial, exponent: Exponent, budget: &Budget) -> Option<Fraction> {
    if base.is_zero() {
        return Some(Fraction::integer(0));
    }
    if let Some((monomial, coefficient)) = base.single() {
        let splits = exponent.is_integer() || monomial.0.values().all(|e| splits(*e));
        if splits {
            return term_power(monomial, coefficient, exponent, budget);
        }
    }
    let whole = exponent.numer().div_floor(exponent.denom());
    if whole > MAX_EXPANDED_POWER {
        return None;
    }
    let mut result = Polynomial::one();
    for _ in 0..whole {
        result = result.times(base, budget)?;
    }
    let rest = exponent - whole;
    let mut result = Fraction::new(result);
    if !rest.is_zero() {
        let content = base.content();
        let number = rational_power(&Fraction::constant(content.clone()), rest, budget)?;
        let sum = Atom::Sum(base.scale(&content.recip())?);
        let root = Polynomial::atom(sum, rest)?;
        result = result.times(&number, budget)?;
        result = result.times(&Fraction::new(root), budget)?;
    }
    Some(result)
}

/// Returns true if `(x^e)^q` is `x^(e q)`: for odd numerators, without an absolute value.
fn splits(exponent: Exponent) -> bool {
    exponent.numer().is_odd()
}

fn term_power(
    monomial: &Monomial,
    coefficient: &BigRational,
    exponent: Exponent,
    budget: &Budget,
) -> Option<Fraction> {
    let mut result = number_power(coefficient, exponent, budget)?;
    for (atom, own) in &monomial.0 {
        let new = product(*own, exponent)?;
        let factor = match atom.as_ref() {
            Atom::Sum(sum) => polynomial_power(sum, new, budget)?,
            _ => Fraction::new(Polynomial::atom(atom.as_ref().clone(), new)?),
        };
        result = result.times(&factor, budget)?;
    }
    Some(result)
}

/// Raises a rational number to a rational power, as powers of primes.
fn number_power(base: &BigRational, exponent: Exponent, budget: &Budget) -> Option<Fraction> {
    if exponent.is_integer()
        && let Some(power) = integer_power(base, *exponent.numer())
    {
        return Some(Fraction::constant(power));
    }
    if base.is_zero() {
        return (exponent > Exponent::zero()).then(|| Fraction::integer(0));
    }
    let mut result = Polynomial::one();
    let mut atoms = Vec::new();
    if base.is_negative() {
        // (-1)^(p/q) is i^(2p/q).
        atoms.push((Atom::Imaginary, product(exponent, Ratio::from_integer(2))?));
    }
    for (prime, count) in primes(&base.abs(), budget)? {
        atoms.push((prime, product(exponent, count)?));
    }
    for (atom, exponent) in atoms {
        result = result.times(&Polynomial::atom(atom, exponent)?, budget)?;
    }
    Some(Fraction::new(result))
}

fn product(a: Exponent, b: Exponent) -> Option<Exponent> {
    let numerator = a.numer().checked_mul(*b.numer())?;
    Some(Ratio::new(numerator, a.denom().checked_mul(*b.denom())?))
}

/// Returns a positive rational number's prime factors.
fn primes(x: &BigRational, budget: &Budget) -> Option<Vec<(Atom, Exponent)>> {
    let numerator = factorize(x.numer(), budget)?.into_iter();
    let denominator = factorize(x.denom(), budget)?.into_iter();
    let counts = numerator.chain(denominator.map(|(prime, count)| (prime, -count)));
    let atoms = counts.map(|(prime, count)| (Atom::Prime(prime), Ratio::from_integer(count)));
    Some(atoms.collect())
}

/// Returns `base^exponent` for an exponent with variables or irrational numbers, as the product of
/// `base^term` over the exponent's terms.
fn symbolic_power(base: &Fraction, exponent: &Fraction, budget: &Budget) -> Option<Fraction> {
    let terms: Vec<(Monomial, BigRational)> = match exponent.denominator.as_constant() {
        Some(_) => exponent.numerator.0.clone().into_iter().collect(),
        None => {
            let quotient = Atom::Call("quotient".to_owned(), vec![exponent.clone()]);
            vec![(single_atom(quotient), BigRational::one())]
        }
    };
    let one = Fraction::integer(1);
    let mut result = one.clone();
    for (monomial, coefficient) in terms {
        let small = Ratio::new_raw(coefficient.numer().to_i64()?, coefficient.denom().to_i64()?);
        within_exponent(small)?;
        let factor = if monomial.0.is_empty() {
            rational_power(base, small, budget)?
        } else {
            let top = atom_powers(&base.numerator, &monomial, small, budget)?;
            let bottom = atom_powers(&base.denominator, &monomial, small, budget)?;
            top.over(&bottom, budget)?
        };
        result = result.times(&factor, budget)?;
    }
    Some(result)
}

fn single_atom(atom: Atom) -> Monomial {
    Monomial([(Arc::new(atom), Exponent::one())].into())
}

/// Returns `base^(monomial * factor)`.
fn atom_powers(
    base: &Polynomial,
    monomial: &Monomial,
    factor: Exponent,
    budget: &Budget,
) -> Option<Fraction> {
    let simple = base
        .single()
        .filter(|(_, coefficient)| coefficient.is_positive());
    let bases = match simple {
        Some((own, coefficient)) => {
            let mut bases = primes(coefficient, budget)?;
            bases.extend(own.0.iter().map(|(atom, e)| (atom.as_ref().clone(), *e)));
            bases
        }
        None if base.is_zero() => return None,
        None => vec![(Atom::Sum(base.clone()), Exponent::one())],
    };
    let mut result = Fraction::integer(1);
    for (atom, exponent) in bases {
        let exponent = product(exponent, factor)?;
        let power = Atom::Power(Arc::new(atom), monomial.clone());
        let power = Polynomial::atom(power, exponent)?;
        result = result.times(&Fraction::new(power), budget)?;
    }
    Some(result)
}

/// Returns the root with an index. Odd roots of negative numbers are real.
pub(super) fn root(radicand: &Fraction, index: i64, budget: &Budget) -> Option<Fraction> {
    if index < 1 {
        return None;
    }
    let exponent = Ratio::new_raw(1, index);
    match radicand.as_constant() {
        Some(number) if number.is_negative() && index.is_odd() => {
            rational_power(&radicand.negated()?, exponent, budget)?.negated()
        }
        _ => rational_power(radicand, exponent, budget),
    }
}

/// Evaluates a function with one argument. An unknown function stays as it is.
pub(super) fn call(name: &str, argument: &Fraction, budget: &Budget) -> Option<Fraction> {
    budget.spend(4)?;
    let one = Fraction::integer(1);
    let inner = |name| call(name, argument, budget);
    match name {
        "tan" => inner("sin")?.over(&inner("cos")?, budget),
        "cot" => inner("cos")?.over(&inner("sin")?, budget),
        "sec" => one.over(&inner("cos")?, budget),
        "csc" => one.over(&inner("sin")?, budget),
        "log" | "lg" => inner("ln")?.over(&call("ln", &Fraction::integer(10), budget)?, budget),
        "exp" => power(&Fraction::atom(Atom::Euler)?, argument, budget),
        "sin" | "arcsin" | "arctan" | "sinh" if argument.numerator.is_zero() => {
            Some(Fraction::integer(0))
        }
        "cos" | "cosh" if argument.numerator.is_zero() => Some(one),
        "sin" | "arcsin" | "arctan" | "sinh" if argument.numerator.is_negative() => {
            call(name, &argument.negated()?, budget)?.negated()
        }
        "cos" | "abs" | "cosh" if argument.numerator.is_negative() => {
            call(name, &argument.negated()?, budget)
        }
        "ln" => logarithm(argument, budget),
        "abs" => match argument.as_constant() {
            Some(number) => Some(Fraction::constant(number.abs())),
            None => opaque(name, vec![argument.clone()]),
        },
        "floor" | "ceil" => match argument.as_constant() {
            Some(x) if name == "floor" => Some(Fraction::constant(x.floor())),
            Some(x) => Some(Fraction::constant(x.ceil())),
            None => opaque(name, vec![argument.clone()]),
        },
        "factorial" => match argument.as_integer() {
            Some(n @ 0..) if n <= i64::from(MAX_FACTORIAL) => {
                let product = (1..=n).fold(BigInt::one(), |product, k| product * k);
                budget.spend(n as usize)?;
                Some(Fraction::constant(BigRational::from_integer(product)))
            }
            _ => opaque(name, vec![argument.clone()]),
        },
        _ => opaque(name, vec![argument.clone()]),
    }
}

/// Returns an unevaluated function.
pub(super) fn opaque(name: &str, arguments: Vec<Fraction>) -> Option<Fraction> {
    Fraction::atom(Atom::Call(name.to_owned(), arguments))
}

/// Returns the natural logarithm. For a product of primes and e, it is the sum of their logarithms.
fn logarithm(argument: &Fraction, budget: &Budget) -> Option<Fraction> {
    let terms = argument.numerator.single();
    let known = |monomial: &Monomial| {
        let mut atoms = monomial.0.keys();
        atoms.all(|atom| matches!(atom.as_ref(), Atom::Prime(_) | Atom::Euler))
    };
    let Some((monomial, coefficient)) = terms.filter(|(monomial, coefficient)| {
        argument.denominator.as_constant().is_some() && coefficient.is_positive() && known(monomial)
    }) else {
        return opaque("ln", vec![argument.clone()]);
    };
    let mut factors = primes(coefficient, budget)?;
    factors.extend(
        monomial
            .0
            .iter()
            .map(|(atom, e)| (atom.as_ref().clone(), *e)),
    );
    let mut sum = Fraction::integer(0);
    for (atom, exponent) in factors {
        let logarithm = match atom {
            Atom::Euler => Fraction::integer(1),
            atom => opaque("ln", vec![Fraction::atom(atom)?])?,
        };
        let exponent = BigRational::new((*exponent.numer()).into(), (*exponent.denom()).into());
        let term = Fraction::constant(exponent).times(&logarithm, budget)?;
        sum = sum.plus(&term, budget)?;
    }
    Some(sum)
}

/// Returns the binomial coefficient `n` over `k`.
pub(super) fn binomial(n: &Fraction, k: &Fraction, budget: &Budget) -> Option<Fraction> {
    match (n.as_integer(), k.as_integer()) {
        (Some(n), Some(k)) if 0 <= k && k <= n && n <= i64::from(MAX_FACTORIAL) => {
            budget.spend(k as usize)?;
            let product = (1..=k).fold(BigInt::one(), |product, i| product * (n - k + i) / i);
            (product.bits() <= MAX_BITS)
                .then(|| Fraction::constant(BigRational::from_integer(product)))
        }
        _ => opaque("binomial", vec![n.clone(), k.clone()]),
    }
}
