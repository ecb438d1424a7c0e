//! What errors say, word for word: a figure in another's place would mislead.

/// What an error says, and what it should say.
pub fn pair(error: impl ToString, expected: impl Into<String>) -> (String, String) {
    (error.to_string(), expected.into())
}

/// Each of `said` is as it should be, and no error of the `sources` is missing.
#[track_caller]
pub fn assert_said(said: &[(String, String)], sources: &[&str]) {
    for (said, expected) in said {
        assert_eq!(said, expected);
    }
    let sentences: usize = sources.iter().map(|source| source.matches("#[error(").count()).sum();
    assert_eq!(said.len(), sentences, "an error has no sentence here");
}
