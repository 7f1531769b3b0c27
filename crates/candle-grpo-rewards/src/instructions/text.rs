//! Parts in a text.

use unicode_segmentation::UnicodeSegmentation;
use whatlang::Lang;

/// IFEval's languages by code.
const LANGUAGES: [(&str, Lang); 29] = [
    ("ar", Lang::Ara),
    ("bg", Lang::Bul),
    ("bn", Lang::Ben),
    ("de", Lang::Deu),
    ("en", Lang::Eng),
    ("es", Lang::Spa),
    ("fa", Lang::Pes),
    ("fi", Lang::Fin),
    ("fr", Lang::Fra),
    ("gu", Lang::Guj),
    ("he", Lang::Heb),
    ("hi", Lang::Hin),
    ("it", Lang::Ita),
    ("ja", Lang::Jpn),
    ("kn", Lang::Kan),
    ("ko", Lang::Kor),
    ("ml", Lang::Mal),
    ("mr", Lang::Mar),
    ("ne", Lang::Nep),
    ("pa", Lang::Pan),
    ("pl", Lang::Pol),
    ("pt", Lang::Por),
    ("ru", Lang::Rus),
    ("ta", Lang::Tam),
    ("te", Lang::Tel),
    ("th", Lang::Tha),
    ("uk", Lang::Ukr),
    ("ur", Lang::Urd),
    ("vi", Lang::Vie),
];

/// Returns the language codes that can be detected.
pub(super) fn languages() -> impl Iterator<Item = &'static str> {
    LANGUAGES.iter().map(|(code, _)| *code)
}

/// Returns whether `text` is in a language. If no language can be detected, any language matches,
/// as in IFEval.
pub(super) fn is_in_language(text: &str, code: &str) -> bool {
    match whatlang::detect_lang(text) {
        Some(found) => LANGUAGES.contains(&(code, found)),
        None => true,
    }
}

/// Counts the sentences with at least one letter or digit.
pub(super) fn sentences(text: &str) -> usize {
    text.unicode_sentences().count()
}

/// Returns the words: runs of letters, digits and underscores.
pub(super) fn words(text: &str) -> impl Iterator<Item = &str> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let words = text.split(move |c| !is_word(c));
    words.filter(|word| !word.is_empty())
}

/// Returns whether `text` has letters with case, all of them upper case.
pub(super) fn is_upper(text: &str) -> bool {
    text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase)
}

/// Returns whether `text` has letters with case, all of them lower case.
pub(super) fn is_lower(text: &str) -> bool {
    text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase)
}
