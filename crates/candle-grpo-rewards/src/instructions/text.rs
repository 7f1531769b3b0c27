//! Parts in a text.

use std::collections::BTreeSet;

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

/// Swahili, which `whatlang` does not know.
const SWAHILI: &str = "sw";

/// Frequent Swahili function words.
const SWAHILI_WORDS: [&str; 40] = [
    "ambao", "ambayo", "au", "baada", "bila", "cha", "hadi", "hata", "hii", "hiyo", "hizi", "hizo",
    "huo", "huu", "ili", "kabla", "kama", "katika", "kila", "kutoka", "kuwa", "kwa", "la",
    "lakini", "mimi", "na", "ni", "pia", "sana", "sisi", "vya", "wa", "wako", "wangu", "wao",
    "watu", "ya", "yake", "yeye", "za",
];

/// Smallest share of these words in a Swahili text. In longer texts of other languages, it is below
/// 5%.
const SWAHILI_SHARE: f64 = 0.2;

/// Smallest number of different ones among them: short texts may have one of another language.
const SWAHILI_DISTINCT: usize = 3;

/// Returns the language codes that can be detected.
pub(super) fn languages() -> impl Iterator<Item = &'static str> {
    let codes = LANGUAGES.iter().map(|(code, _)| *code);
    codes.chain([SWAHILI])
}

/// Returns whether `text` is in a language. If no language can be detected, any language matches,
/// as in IFEval.
pub(super) fn is_in_language(text: &str, code: &str) -> bool {
    if is_swahili(text) {
        return code == SWAHILI;
    }
    match whatlang::detect_lang(text) {
        Some(found) => LANGUAGES.contains(&(code, found)),
        None => true,
    }
}

fn is_swahili(text: &str) -> bool {
    let text = text.to_lowercase();
    let all: Vec<&str> = words(&text).collect();
    let known = all.iter().filter(|word| SWAHILI_WORDS.contains(word));
    let distinct: BTreeSet<&str> = known.clone().copied().collect();
    let share = known.count() as f64 / all.len().max(1) as f64;
    distinct.len() >= SWAHILI_DISTINCT && share >= SWAHILI_SHARE
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swahili_is_told_from_other_languages() {
        let text = "Samaki wanaishi katika bahari na mito, kwa sababu wanahitaji maji ili kupumua.";
        assert!(is_in_language(text, "sw") && !is_in_language(text, "en"));
        for (text, code) in [
            (
                "The fish live in the sea and in rivers, because they need water.",
                "en",
            ),
            (
                "Los peces viven en el mar y en la orilla, porque necesitan agua.",
                "es",
            ),
            (
                "I pesci vivono nel mare, e la gente ne mangia ogni giorno.",
                "it",
            ),
            (
                "Kalat elävät meressä ja joissa, koska ne tarvitsevat vettä.",
                "fi",
            ),
        ] {
            assert!(
                is_in_language(text, code) && !is_in_language(text, "sw"),
                "{text}"
            );
        }
        for text in ["La vie à la campagne", "LA LA LAND"] {
            assert!(!is_swahili(text), "{text}");
        }
        assert!(languages().any(|code| code == "sw"));
    }
}
