//! Addresses of models: what of them may be shown, and what may not stand in them.
//!
//! The spec's address is copied into `status.versions` and into ModelVersions, which more people may read than Secrets. So
//! credentials in it are refused (by a rule of the CRD, and by [`credential`] for objects stored before it), and nothing
//! that is shown elsewhere (conditions, Events, logs) has more of it than [`shown`] leaves.

/// Longest address that is shown, in characters.
pub const SHOWN_CHARS_MAX: usize = 256;

/// How the names of query parameters end that are credentials, whatever is before it: `X-Amz-Signature`, `refreshToken`. Signatures
/// of S3, Google Cloud Storage, OSS and COS, tokens, GitLab's among them, keys, and passwords. In small letters; they are compared
/// without regard to case.
pub const CREDENTIAL_ENDINGS: [&str; 18] = [
    "signature",
    "credential",
    "credentials",
    "token",
    "secret",
    "password",
    "passwd",
    "pwd",
    "passphrase",
    "bearer",
    "authorization",
    "apikey",
    "accesskey",
    "accesskeyid",
    "secretkey",
    "privatekey",
    "signingkey",
    "subscriptionkey",
];

/// The same where it is the whole name, or its last word after `-`, `_` or `.`: `sig` of Azure is one, and `config` is none.
pub const CREDENTIAL_WORDS: [&str; 5] = ["sig", "sas", "key", "jwt", "auth"];

/// The same where it is the whole name alone: `code` is a key of Azure's functions, and `country_code` is none.
pub const CREDENTIAL_NAMES: [&str; 3] = ["pass", "pw", "code"];

/// A credential that stands in an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Credential {
    /// A user name, with or without a password.
    #[error(
        "it has a user name, which everybody sees who may read the object; store a token in a Secret, and name it with secretRef"
    )]
    User,
    /// A parameter of the query, whose name ends so.
    #[error(
        "its parameter that is called {0}, or ends so, is a credential, which everybody sees who may read the object; store a token in a Secret, and name it with secretRef"
    )]
    Parameter(&'static str),
    /// A parameter of the query whose name is not told as it is: `%74oken`.
    #[error(
        "a name of its parameters is percent-encoded, so that nobody sees whether it is a credential; write the names as they are"
    )]
    Encoded,
    /// What is behind `#`: no server is sent it, so that it is of no use but to note something secret.
    #[error(
        "it has a fragment (#...), which no server is sent and everybody sees who may read the object; leave it out, and store a token in a Secret that secretRef names"
    )]
    Fragment,
}

/// The credential in an address, if there is one.
#[must_use]
pub fn credential(address: &str) -> Option<Credential> {
    let (before, query) = address.split_once('?').unwrap_or((address, ""));
    if authority(before).contains('@') {
        return Some(Credential::User);
    }
    let query = query.split('#').next().unwrap_or_default();
    let names = || query.split(['&', ';', '?']).filter_map(|pair| pair.split_once('=')).map(|(name, _)| name);
    if let Some(ending) = names().find_map(credential_name) {
        return Some(Credential::Parameter(ending));
    }
    if names().any(|name| name.contains('%')) {
        return Some(Credential::Encoded);
    }
    address.contains('#').then_some(Credential::Fragment)
}

/// The end of a parameter's name that says that it is a credential.
fn credential_name(name: &str) -> Option<&'static str> {
    let name = name.to_ascii_lowercase();
    let last = name.rsplit(['-', '_', '.']).next().unwrap_or_default();
    let word = CREDENTIAL_WORDS.into_iter().find(|word| *word == last);
    let whole = || CREDENTIAL_NAMES.into_iter().find(|whole| *whole == name);
    word.or_else(whole).or_else(|| CREDENTIAL_ENDINGS.into_iter().find(|ending| name.ends_with(ending)))
}

/// Whether an address always means the same file, of which its store tells the digest: one of Hugging Face's with a commit as
/// revision, or one of a registry's with the digest of a manifest.
#[must_use]
pub fn is_pinned(address: &str) -> bool {
    let is_hex = |text: &str, digits: usize| {
        text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    if let Some(rest) = address.strip_prefix("hf://") {
        let revision = rest.split('/').nth(1).and_then(|repository| repository.split_once('@'));
        return rest.splitn(3, '/').count() == 3 && revision.is_some_and(|(_, revision)| is_hex(revision, 40));
    }
    let manifest = address.strip_prefix("oci://").and_then(|rest| rest.rsplit_once("@sha256:"));
    manifest.is_some_and(|(_, digest)| is_hex(digest, 64))
}

/// The address without what may be secret in it: user, password, query, fragment. Of a long one, the beginning.
#[must_use]
pub fn shown(address: &str) -> String {
    let before = address.split(['?', '#']).next().unwrap_or_default();
    let authority = authority(before);
    let text = match authority.rsplit_once('@') {
        Some((user, _)) => before.replacen(&format!("{user}@"), "", 1),
        None => before.to_owned(),
    };
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// User, host and port. Parsers of addresses overlook slashes before them that are too many or missing, and take a backslash
/// for a slash.
fn authority(before_query: &str) -> &str {
    let before_fragment = before_query.split('#').next().unwrap_or_default();
    let web = before_fragment
        .split_once(':')
        .filter(|(scheme, _)| ["http", "https"].iter().any(|known| known.eq_ignore_ascii_case(scheme)));
    let after_scheme = web.or_else(|| before_fragment.split_once("://")).map_or(before_fragment, |(_, rest)| rest);
    let begins = after_scheme.trim_start_matches(['/', '\\']);
    begins.split(['/', '\\']).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_may_be_secret_is_not_shown() {
        for (address, wanted) in [
            ("https://h/m.gguf", "https://h/m.gguf"),
            ("https://user:pass@h:1/m.gguf?sig=hush#x", "https://h:1/m.gguf"),
            ("https://user:p@ss@h/m@2.gguf", "https://h/m@2.gguf"),
            ("https:////user:pass@h/m.gguf", "https:////h/m.gguf"),
            ("https:\\\\user:pass@h\\m.gguf", "https:\\\\h\\m.gguf"),
            ("HTTPS:user:pass@h/m.gguf", "HTTPS:h/m.gguf"),
            ("user:pass@h/m.gguf?hush", "h/m.gguf"),
            ("hf://org/repo@0a1b/m.gguf", "hf://org/repo@0a1b/m.gguf"),
            ("https://h/m.gguf#hush", "https://h/m.gguf"),
            ("", ""),
        ] {
            assert_eq!(shown(address), wanted, "{address}");
        }
        let long = shown(&format!("https://h/{}", "ä".repeat(SHOWN_CHARS_MAX)));
        assert!(long.ends_with("ä…") && long.chars().count() == SHOWN_CHARS_MAX + 1, "{long}");
    }

    #[test]
    fn credentials_are_found_and_nothing_else_is_taken_for_one() {
        for address in [
            "https://h/m.gguf",
            "https://h/m.gguf?download=true&design=1&author=a&tokenizer=t&max_tokens=5&keyword=k&signed=1&key_id&\
             config=1&monkey=1&first_pass=1&country_code=1&oauth=no&version=1%2E0",
            "https://h/token=1/m.gguf",
            "https://h/R&D%20models;sig=1/m.gguf",
            "https://h/m@2.gguf?to=a@b",
            "hf://org/repo@0a1b/m.gguf",
            "oci://registry/repo@sha256:0a",
        ] {
            assert_eq!(credential(address), None, "{address}");
        }
        for address in
            ["https://u:p@h/m", "https://token@h/m", "https:////u:p@h/m", "https:\\\\u:p@h\\m", "https://@h/m"]
        {
            assert_eq!(credential(address), Some(Credential::User), "{address}");
        }
        for (query, word) in [
            ("X-Amz-Algorithm=a&X-Amz-Signature=1", "signature"),
            ("X-Goog-Credential=1", "credential"),
            ("x-oss-security-token=1", "token"),
            ("q-signature=1", "signature"),
            ("private_token=1", "token"),
            ("AWSAccessKeyId=1", "accesskeyid"),
            ("sv=1&SIG=hush", "sig"),
            ("token=", "token"),
            ("a=1;access_token=2#x", "token"),
            ("accessToken=1", "token"),
            ("refreshToken=1", "token"),
            ("sasToken=1", "token"),
            ("secretKey=1", "secretkey"),
            ("key=1", "key"),
            ("apiKey=1", "apikey"),
            ("api-key=1", "key"),
            ("subscription-key=1", "key"),
            ("jwt=1", "jwt"),
            ("auth=1", "auth"),
            ("Authorization=1", "authorization"),
            ("client_secret=1", "secret"),
            ("sas=1", "sas"),
            ("user.password=1", "password"),
            ("pass=1", "pass"),
            ("pw=1", "pw"),
            ("code=1", "code"),
        ] {
            assert_eq!(credential(&format!("https://h/m?{query}")), Some(Credential::Parameter(word)), "{query}");
        }
        for query in ["%73ig=1", "a=1&t%6fken=1", "%=1"] {
            assert_eq!(credential(&format!("https://h/m?{query}")), Some(Credential::Encoded), "{query}");
        }
        for address in ["https://h/m.gguf#token=1", "https://h/m.gguf?a=1#", "https://h/m.gguf#/?b=1"] {
            assert_eq!(credential(address), Some(Credential::Fragment), "{address}");
        }
    }

    #[test]
    fn an_address_is_pinned_by_a_commit_or_by_the_digest_of_a_manifest() {
        let (commit, digest) = ("0a".repeat(20), "0a".repeat(32));
        for (address, pinned) in [
            (format!("hf://o/r@{commit}/m.gguf"), true),
            (format!("oci://h/m:v1@sha256:{digest}"), true),
            (format!("oci://h/m@sha256:{digest}"), true),
            (format!("hf://o/r@{commit}"), false),
            (format!("hf://o/r@{}/m.gguf", &commit[1..]), false),
            (format!("hf://o/r/{commit}/m.gguf"), false),
            ("hf://o/r@main/m.gguf".to_owned(), false),
            ("oci://h/m:v1".to_owned(), false),
            (format!("https://h/@sha256:{digest}"), false),
            (format!("s3://b/r@{commit}/m.gguf"), false),
        ] {
            assert_eq!(is_pinned(&address), pinned, "{address}");
        }
    }

    /// What the API server refuses and what the operator refuses must be the same.
    #[test]
    fn the_rules_of_the_crd_name_the_same() {
        let crd = serde_json::to_string(&<crate::InferenceService as kube::CustomResourceExt>::crd()).unwrap();
        let (endings, words) = (CREDENTIAL_ENDINGS.join("|"), CREDENTIAL_WORDS.join("|"));
        let names = CREDENTIAL_NAMES.join("|");
        let rule = format!("^[^?#]*[?]([^#]*[?&;])?([^#=&;?]*({endings})|([^#=&;?]*[-_.])?({words})|{names})=");
        assert!(crd.contains(&rule), "{rule}");
        assert!(crd.contains("^[^?#]*[?]([^#]*[?&;])?[^#=&;?]*%[^#=&;?]*="));
    }
}
