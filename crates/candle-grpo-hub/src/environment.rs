//! Environment variables that Hugging Face's Python library reads.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::Hub;
use candle_grpo_base::secrets::HUB_TOKENS;

const ENDPOINT: &str = "https://huggingface.co";
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// A file list has at most a few MB, and the hub takes at most a minute for a commit.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Hubs report sizes for weights. A tokenizer has at most some tens of MB.
const UNSIZED_LIMIT: u64 = 1 << 28;

impl Hub {
    /// Creates a hub from the environment, with the variables of the Python library
    /// `huggingface_hub`: `HF_ENDPOINT`, `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`, `HF_TOKEN_PATH`,
    /// `HF_HUB_DISABLE_IMPLICIT_TOKEN` and `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    ///
    /// If the URL or token is invalid, or there is no cache folder.
    pub fn from_environment() -> Result<Self> {
        Self::from_variables(|name| env::var_os(name))
    }

    /// Like [`Self::from_environment`], reading variables through `variable`.
    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let variables = Variables(variable);
        let home = variables.home()?;
        let cache = variables.path(&["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"])?;
        let endpoint = variables.text("HF_ENDPOINT")?;
        let endpoint = endpoint.unwrap_or_else(|| ENDPOINT.to_owned());
        let endpoint = endpoint.trim_end_matches('/');
        ensure!(
            endpoint.starts_with("https://") || endpoint.starts_with("http://"),
            "HF_ENDPOINT: {endpoint:?}, must be an address that begins with https://"
        );
        Ok(Self {
            cache: cache.unwrap_or_else(|| home.join("hub")),
            endpoint: endpoint.to_owned(),
            token: variables.token(&home)?,
            offline: ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"]
                .into_iter()
                .find(|name| variables.is_set(name)),
            first_pause: FIRST_PAUSE,
            answer_limit: ANSWER_LIMIT,
            unsized_limit: UNSIZED_LIMIT,
        })
    }
}

struct Variables<F>(F);

impl<F: Fn(&str) -> Option<OsString>> Variables<F> {
    /// A variable's value, unless it is empty.
    fn value(&self, name: &str) -> Option<OsString> {
        self.0(name).filter(|value| !value.is_empty())
    }

    fn text(&self, name: &str) -> Result<Option<String>> {
        let Some(value) = self.value(name) else {
            return Ok(None);
        };
        let text = value.into_string().ok();
        Ok(Some(
            text.with_context(|| format!("{name}: must be UTF-8"))?,
        ))
    }

    fn is_set(&self, name: &str) -> bool {
        let value = self.value(name).unwrap_or_default().to_ascii_uppercase();
        ["1", "ON", "YES", "TRUE"].iter().any(|yes| value == *yes)
    }

    /// The first variable with a value, as a path. `~` is the user's home folder.
    fn path(&self, names: &[&str]) -> Result<Option<PathBuf>> {
        for name in names {
            let Some(value) = self.value(name) else {
                continue;
            };
            let path = PathBuf::from(value);
            return Ok(Some(match path.strip_prefix("~") {
                Ok(rest) => self.user()?.join(rest),
                Err(_) => path,
            }));
        }
        Ok(None)
    }

    fn user(&self) -> Result<PathBuf> {
        let home = ["HOME", "USERPROFILE"]
            .iter()
            .find_map(|name| self.value(name));
        let home =
            home.context("HF_HOME: not set, and neither is HOME; must be the cache directory")?;
        Ok(PathBuf::from(home))
    }

    /// The folder for the cache and the token.
    fn home(&self) -> Result<PathBuf> {
        if let Some(home) = self.path(&["HF_HOME"])? {
            return Ok(home);
        }
        let caches = match self.path(&["XDG_CACHE_HOME"])? {
            Some(caches) => caches,
            None => self.user()?.join(".cache"),
        };
        Ok(caches.join("huggingface"))
    }

    fn token(&self, home: &Path) -> Result<Option<String>> {
        if self.is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
            return Ok(None);
        }
        for name in HUB_TOKENS {
            if let Some(token) = self.text(name)? {
                return valid(name, &token);
            }
        }
        let path = self.path(&["HF_TOKEN_PATH"])?;
        let path = path.unwrap_or_else(|| home.join("token"));
        match fs::read_to_string(&path) {
            Ok(token) => valid(&path.display().to_string(), &token),
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                Ok(None)
            }
            Err(error) => bail!("the token in {}: {error}", path.display()),
        }
    }
}

/// Returns a token without surrounding white space. Messages do not print it.
fn valid(place: &str, token: &str) -> Result<Option<String>> {
    let token = token.trim();
    ensure!(
        token.bytes().all(|byte| byte.is_ascii_graphic()),
        "{place}: must be a token with only printable ASCII characters"
    );
    Ok((!token.is_empty()).then(|| token.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn hub(variables: &[(&str, &str)]) -> Result<Hub> {
        Hub::from_variables(|name| {
            let found = variables.iter().find(|(found, _)| *found == name);
            found.map(|(_, value)| OsString::from(value))
        })
    }

    #[rstest]
    #[case::home(&[("HOME", "/u")], "/u/.cache/huggingface/hub")]
    #[case::windows(&[("USERPROFILE", "/u")], "/u/.cache/huggingface/hub")]
    #[case::xdg(&[("HOME", "/u"), ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub")]
    #[case::hf_home(&[("HOME", "/u"), ("HF_HOME", "~/hf")], "/u/hf/hub")]
    #[case::cache(&[("HF_HOME", "/h"), ("HF_HUB_CACHE", "/c")], "/c")]
    #[case::old_name(&[("HF_HOME", "/h"), ("HUGGINGFACE_HUB_CACHE", "/c")], "/c")]
    #[case::empty(&[("HF_HOME", "/h"), ("HF_HUB_CACHE", "")], "/h/hub")]
    fn the_cache_is_where_the_python_library_has_it(
        #[case] variables: &[(&str, &str)],
        #[case] cache: &str,
    ) {
        assert_eq!(hub(variables).unwrap().cache, Path::new(cache));
    }

    #[test]
    fn defaults_and_other_values() {
        let plain = hub(&[("HF_HOME", "/none")]).unwrap();
        assert_eq!(plain.endpoint, "https://huggingface.co");
        assert_eq!((plain.offline, plain.token), (None, None));
        for (value, offline) in [
            ("1", true),
            ("on", true),
            ("True", true),
            ("0", false),
            ("no", false),
        ] {
            let hub = hub(&[("HF_HOME", "/none"), ("HF_HUB_OFFLINE", value)]).unwrap();
            assert_eq!(hub.offline.is_some(), offline, "{value}");
        }
        let mirror = hub(&[
            ("HF_HOME", "/none"),
            ("HF_ENDPOINT", "http://mirror:80/hf/"),
        ])
        .unwrap();
        assert_eq!(mirror.endpoint, "http://mirror:80/hf");
    }

    #[test]
    fn the_token_is_that_of_the_variable_or_else_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().to_str().unwrap();
        let token = |more: &[(&str, &str)]| {
            let variables = [&[("HF_HOME", home)], more].concat();
            hub(&variables).unwrap().token
        };
        assert_eq!(token(&[]), None);
        fs::write(folder.path().join("token"), "hf_file\n").unwrap();
        fs::write(folder.path().join("other"), " hf_other").unwrap();
        assert_eq!(token(&[]).as_deref(), Some("hf_file"));
        let other = folder.path().join("other");
        let path = ("HF_TOKEN_PATH", other.to_str().unwrap());
        assert_eq!(token(&[path]).as_deref(), Some("hf_other"));
        assert_eq!(
            token(&[path, ("HF_TOKEN", "hf_a ")]).as_deref(),
            Some("hf_a")
        );
        assert_eq!(
            token(&[("HUGGING_FACE_HUB_TOKEN", "hf_b")]).as_deref(),
            Some("hf_b")
        );
        assert_eq!(token(&[("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), None);
    }

    #[rstest]
    #[case::endpoint(&[("HF_HOME", "/h"), ("HF_ENDPOINT", "huggingface.co")], "HF_ENDPOINT: \"huggingface.co\", must be an address")]
    #[case::no_home(&[], "HF_HOME: not set, and neither is HOME")]
    #[case::token(&[("HF_HOME", "/h"), ("HF_TOKEN", "hf\n_secret")], "HF_TOKEN: must be a token")]
    fn a_wrong_value_names_its_variable(#[case] variables: &[(&str, &str)], #[case] words: &str) {
        let error = hub(variables).err().unwrap().to_string();
        assert!(error.starts_with(words), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }
}
