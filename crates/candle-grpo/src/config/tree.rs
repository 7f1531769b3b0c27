//! Deserializes value trees, with errors that keep the key.

use std::fmt;

use candle_grpo_nn::json;
use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, Error, Expected, IntoDeserializer, Unexpected,
    VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;
use serde_json::Value;

/// Why a value does not fit its key's type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TypeError {
    /// A key that its section does not have.
    UnknownKey {
        key: String,
        known: &'static [&'static str],
    },
    /// A name that the key does not accept.
    UnknownName {
        name: String,
        known: &'static [&'static str],
    },
    /// A key that must be given.
    Missing { key: &'static str },
    /// A value with another type.
    WrongKind { found: String, expected: String },
    /// Anything else.
    Other(String),
}

/// The hint after an error about a boolean.
pub(super) const QUOTE_HINT: &str =
    " (YAML reads y, n, yes, no, on and off as true or false, unless they are in quotation marks)";

/// Returns a value as [`TypeError::WrongKind`] has it.
pub(super) fn shown(value: &Value) -> String {
    match (value, value.as_u64(), value.as_i64(), value.as_f64()) {
        (Value::String(text), ..) => plain(Unexpected::Str(text)),
        (Value::Array(_), ..) => plain(Unexpected::Seq),
        (Value::Object(_), ..) => plain(Unexpected::Map),
        (_, None, None, Some(x)) => plain(Unexpected::Float(x)),
        (scalar, ..) => scalar.to_string(),
    }
}

impl fmt::Display for TypeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownKey { key, .. } => write!(f, "unknown key `{key}`"),
            Self::UnknownName { name, known } => {
                write!(f, "{name:?}, must be one of {}", known.join(", "))
            }
            Self::Missing { key } => write!(f, "{key}: absent, must be given"),
            Self::WrongKind { found, expected } => write!(f, "{found}, must be {expected}"),
            Self::Other(message) => f.write_str(message),
        }
    }
}

impl std::error::Error for TypeError {}

impl Error for TypeError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::Other(message.to_string())
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let expected = expected.to_string();
        let kind = json::kind(&expected);
        let is_number = matches!(
            found,
            Unexpected::Unsigned(_) | Unexpected::Signed(_) | Unexpected::Float(_)
        );
        // A key may have a greater minimum than its type, so the message leaves the minimum out.
        let kind = if is_number {
            kind
        } else {
            kind.strip_suffix(", at least 0").unwrap_or(kind)
        };
        let hint = match found {
            Unexpected::Bool(_) if !kind.contains("number") => QUOTE_HINT,
            _ => "",
        };
        Self::WrongKind {
            found: plain(found),
            expected: format!("{kind}{hint}"),
        }
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::invalid_type(found, expected)
    }

    fn invalid_length(length: usize, expected: &dyn Expected) -> Self {
        Self::Other(format!(
            "{length} entries, must be {}",
            json::kind(&expected.to_string())
        ))
    }

    fn unknown_variant(name: &str, known: &'static [&'static str]) -> Self {
        let name = name.to_owned();
        Self::UnknownName { name, known }
    }

    fn unknown_field(key: &str, known: &'static [&'static str]) -> Self {
        let key = key.to_owned();
        Self::UnknownKey { key, known }
    }

    fn missing_field(key: &'static str) -> Self {
        Self::Missing { key }
    }

    fn duplicate_field(key: &'static str) -> Self {
        Self::Other(format!("{key}: given twice, must be given once"))
    }
}

/// Returns a found value in configuration file terms.
fn plain(found: Unexpected<'_>) -> String {
    match found {
        Unexpected::Bool(x) => x.to_string(),
        Unexpected::Unsigned(x) => x.to_string(),
        Unexpected::Signed(x) => x.to_string(),
        // 1e9 as 1000000000.0, which is no whole number.
        Unexpected::Float(x) => format!("{x:?}"),
        Unexpected::Str(x) => format!("{x:?}"),
        Unexpected::Unit | Unexpected::Option => "null".to_owned(),
        Unexpected::Seq => "a list".to_owned(),
        Unexpected::Map => "a mapping".to_owned(),
        Unexpected::UnitVariant => "a name alone".to_owned(),
        Unexpected::NewtypeVariant | Unexpected::TupleVariant | Unexpected::StructVariant => {
            "a name with options".to_owned()
        }
        other => other.to_string(),
    }
}

/// A tree that deserializes with [`TypeError`].
pub(super) struct Tree<'de>(pub(super) &'de Value);

impl<'de> IntoDeserializer<'de, TypeError> for Tree<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Tree<'de> {
    type Error = TypeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TypeError> {
        match self.0 {
            Value::Null => visitor.visit_unit(),
            Value::Bool(x) => visitor.visit_bool(*x),
            Value::Number(x) => match (x.as_u64(), x.as_i64(), x.as_f64()) {
                (Some(x), _, _) => visitor.visit_u64(x),
                (_, Some(x), _) => visitor.visit_i64(x),
                (_, _, Some(x)) => visitor.visit_f64(x),
                _ => Err(TypeError::Other(format!("{x}, must be finite"))),
            },
            Value::String(x) => visitor.visit_borrowed_str(x),
            Value::Array(items) => {
                let mut items = SeqDeserializer::new(items.iter().map(Tree));
                let value = visitor.visit_seq(&mut items)?;
                items.end()?;
                Ok(value)
            }
            Value::Object(map) => {
                let mut map = MapDeserializer::new(
                    map.iter().map(|(key, value)| (key.as_str(), Tree(value))),
                );
                let value = visitor.visit_map(&mut map)?;
                map.end()?;
                Ok(value)
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TypeError> {
        match self.0 {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, TypeError> {
        let must = "a name, or a mapping of a name to its options";
        let (name, options) = match self.0 {
            Value::String(name) => (name, None),
            Value::Object(map) => match (map.iter().next(), map.len()) {
                (Some((name, options)), 1) => (name, Some(options)),
                (_, count) => {
                    let message = format!("a mapping of {count} keys, must be {must}");
                    return Err(TypeError::Other(message));
                }
            },
            other => return Tree(other).deserialize_any(visitor),
        };
        visitor.visit_enum(Choice { name, options })
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, TypeError> {
        visitor.visit_newtype_struct(self)
    }

    /// A list is not a mapping whose keys are left out.
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, TypeError> {
        match self.0 {
            Value::Array(_) => Err(TypeError::Other(
                "a list, must be a mapping of keys".to_owned(),
            )),
            _ => self.deserialize_any(visitor),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map identifier ignored_any
    }
}

/// A variant by its name, with its options.
struct Choice<'de> {
    name: &'de str,
    options: Option<&'de Value>,
}

impl<'de> EnumAccess<'de> for Choice<'de> {
    type Error = TypeError;
    type Variant = Options<'de>;

    fn variant_seed<S: DeserializeSeed<'de>>(
        self,
        seed: S,
    ) -> Result<(S::Value, Options<'de>), TypeError> {
        let name = seed.deserialize(self.name.into_deserializer())?;
        Ok((name, Options(self.options)))
    }
}

struct Options<'de>(Option<&'de Value>);

impl<'de> VariantAccess<'de> for Options<'de> {
    type Error = TypeError;

    fn unit_variant(self) -> Result<(), TypeError> {
        match self.0 {
            None | Some(Value::Null) => Ok(()),
            Some(_) => Err(TypeError::Other(
                "has options, must be a name alone".to_owned(),
            )),
        }
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, TypeError> {
        match self.0 {
            Some(options) => seed.deserialize(Tree(options)),
            None => Err(without_options()),
        }
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, TypeError> {
        self.struct_variant(&[], visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        keys: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, TypeError> {
        match self.0 {
            Some(options) => Tree(options).deserialize_struct("", keys, visitor),
            None => Err(without_options()),
        }
    }
}

fn without_options() -> TypeError {
    TypeError::Other("a name alone, must be a mapping of it to its options".to_owned())
}
