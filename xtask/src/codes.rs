//! Code that a document holds, as the tests of documents read it.

/// What commands in documents begin with.
const PROGRAMS: [&str; 2] = ["cargo", "portcullis"];

/// A document and the code in it.
pub struct Document {
    /// Where it lies below the repository's root.
    pub name: String,
    /// Lines that stand by themselves, each with those that it goes on with.
    pub lines: Vec<String>,
    /// Pieces within sentences.
    pub pieces: Vec<String>,
}

impl Document {
    fn new(name: String, text: &str) -> Self {
        let (mut lines, mut sentences) = (Vec::<String>::new(), String::new());
        let (mut fenced, mut goes_on) = (false, false);
        for line in text.lines() {
            if line.starts_with("```") {
                fenced = !fenced;
                continue;
            }
            if !fenced {
                sentences.extend([line, "\n"]);
                continue;
            }
            let (code, more) = line.strip_suffix('\\').map_or((line, false), |code| (code, true));
            match lines.last_mut() {
                Some(last) if goes_on => last.push_str(code.trim()),
                _ => lines.push(code.trim_start().to_owned()),
            }
            goes_on = more;
        }
        // Between two backticks is every other piece.
        let pieces = sentences.split('`').skip(1).step_by(2);
        let pieces = pieces.map(|piece| piece.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        Self { name, lines, pieces }
    }

    /// The words of each command that begins with `first`. Behind a command stands, after two spaces, what it does.
    pub fn commands<'a>(&'a self, first: &'a str) -> impl Iterator<Item = Vec<&'a str>> {
        let command = move |code: &'a String| {
            let code = code.split("  ").next()?;
            // What a shell does with its input and output is not the command's.
            let code =
                [" | wc", " < ", " > "].iter().fold(code, |code, by| code.split(by).next().unwrap_or(code));
            let code = code.strip_prefix("sudo ").unwrap_or(code);
            // Before the program, variables have their values.
            let starts =
                code.split(' ').next().is_some_and(|word| PROGRAMS.contains(&word) || word.contains('='));
            let words =
                code.split_whitespace().skip_while(|word| !PROGRAMS.contains(word)).collect::<Vec<_>>();
            (starts && words.len() > 1 && words[0] == first).then_some(words)
        };
        self.lines.iter().chain(&self.pieces).filter_map(command)
    }
}

/// All documents of the repository at `root`.
pub fn documents(root: &std::path::Path) -> Vec<Document> {
    let (mut folders, mut names) = (vec![root.to_path_buf()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let is_left_out = name == "target" || name == "corpus" || name.starts_with('.');
            if entry.file_type().unwrap().is_dir() && !is_left_out {
                folders.push(entry.path());
            } else if name.ends_with(".md") {
                names.push(entry.path().strip_prefix(root).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    names.sort();
    let document = |name: String| {
        let text = std::fs::read_to_string(root.join(&name)).unwrap();
        Document::new(name, &text)
    };
    names.into_iter().map(document).collect()
}
