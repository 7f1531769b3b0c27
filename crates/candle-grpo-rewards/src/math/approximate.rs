//! Values at fixed points, in floating point.

use num_complex::Complex64;
use num_rational::BigRational;
use num_traits::ToPrimitive;

use super::polynomial::{Atom, Fraction, Monomial, Polynomial};

/// Number of points at which expressions are compared.
pub(super) const POINTS: u64 = 6;

/// Returns a number from 0.3 to 2.3 that depends on the name. It is negative at the first odd
/// point, and has either sign at the other odd points.
fn coordinate(name: &str, point: u64) -> f64 {
    let mut state = 0xcbf2_9ce4_8422_2325u64 ^ point.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for byte in name.bytes() {
        state = (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    state ^= state >> 31;
    state = state.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state ^= state >> 29;
    let size = 0.3 + 2. * (state >> 12) as f64 / (1u64 << 52) as f64;
    let is_negative = point % 2 == 1 && (point == 1 || state & 1 == 1);
    if is_negative { -size } else { size }
}

fn number(x: &BigRational) -> Complex64 {
    Complex64::from(x.to_f64().unwrap_or(f64::NAN))
}

impl Fraction {
    /// Returns the value at a point, at which each variable and each unknown function has a value.
    pub(super) fn at(&self, point: u64) -> Complex64 {
        self.numerator.at(point) / self.denominator.at(point)
    }

    /// Returns the value, if there are no variables and no unknown functions.
    pub(super) fn real(&self) -> Option<f64> {
        let (a, b) = (self.at(0), self.at(1));
        let is_real = a.im.abs() <= 1e-12 * a.re.abs().max(1.);
        (a == b && is_real && a.re.is_finite()).then_some(a.re)
    }

    /// Returns true if the values agree at all points where they exist, and if there are such
    /// points.
    pub(super) fn is_near(&self, other: &Self) -> bool {
        let mut compared = 0;
        for point in 0..POINTS {
            let (a, b) = (self.at(point), other.at(point));
            if !a.is_finite() || !b.is_finite() {
                if a.is_finite() != b.is_finite() {
                    return false;
                }
                continue;
            }
            if (a - b).norm() > 1e-10 * a.norm().max(b.norm()) {
                return false;
            }
            compared += 1;
        }
        compared >= 2
    }
}

impl Polynomial {
    fn at(&self, point: u64) -> Complex64 {
        let terms = self.0.iter();
        terms
            .map(|(monomial, x)| number(x) * monomial.at(point))
            .sum()
    }
}

impl Monomial {
    fn at(&self, point: u64) -> Complex64 {
        let factors = self.0.iter().map(|(atom, exponent)| {
            let base = atom.at(point);
            if exponent.is_integer() {
                match i32::try_from(*exponent.numer()) {
                    Ok(n) => base.powi(n),
                    Err(_) => base.powf(*exponent.numer() as f64),
                }
            } else {
                base.powf(*exponent.numer() as f64 / *exponent.denom() as f64)
            }
        });
        factors.product()
    }
}

impl Atom {
    fn at(&self, point: u64) -> Complex64 {
        match self {
            Self::Imaginary => Complex64::I,
            Self::Prime(prime) => Complex64::from(prime.to_f64().unwrap_or(f64::NAN)),
            Self::Euler => Complex64::from(std::f64::consts::E),
            Self::Pi => Complex64::from(std::f64::consts::PI),
            Self::Symbol(name) => Complex64::from(coordinate(name, point)),
            Self::Sum(sum) => sum.at(point),
            Self::Power(base, exponent) => base.at(point).powc(exponent.at(point)),
            Self::Call(name, arguments) => call(name, arguments, point, self),
        }
    }
}

fn call(name: &str, arguments: &[Fraction], point: u64, atom: &Atom) -> Complex64 {
    let x = match arguments {
        [x] => x.at(point),
        _ => Complex64::from(f64::NAN),
    };
    match name {
        "sin" => x.sin(),
        "cos" => x.cos(),
        "ln" => x.ln(),
        "abs" => Complex64::from(x.norm()),
        "arcsin" => x.asin(),
        "arccos" => x.acos(),
        "arctan" => x.atan(),
        "sinh" => x.sinh(),
        "cosh" => x.cosh(),
        "tanh" => x.tanh(),
        "floor" => Complex64::from(x.re.floor()),
        "ceil" => Complex64::from(x.re.ceil()),
        "quotient" => x,
        _ => Complex64::from(coordinate(&format!("{atom:?}"), point)),
    }
}
