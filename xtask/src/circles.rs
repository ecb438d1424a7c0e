//! The modules of the core use each other one way: no two beside each other do so in a circle.
//!
//! It reads paths: `use` declarations, and paths in expressions, types and signatures, with names that a module
//! declares with `use` followed to the module that they lead to. A call of a method names no module, and is not seen.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use syn::visit::Visit;

type Names = Vec<String>;

/// A module: the modules below it, what its `use` declarations call names, and the paths in it.
#[derive(Default)]
struct Module {
    declared: BTreeMap<String, Names>,
    paths: BTreeSet<Names>,
}

/// All modules of a crate, by the names that lead to them.
#[derive(Default)]
struct Modules(BTreeMap<Names, Module>);

/// Goes through one file, and knows in which module it is.
struct Reader<'a> {
    modules: &'a mut Modules,
    at: Names,
}

impl Reader<'_> {
    fn module(&mut self) -> &mut Module {
        self.modules.0.entry(self.at.clone()).or_default()
    }

    fn uses(&mut self, tree: &syn::UseTree, mut path: Names) {
        match tree {
            syn::UseTree::Path(step) => {
                path.push(step.ident.to_string());
                self.uses(&step.tree, path);
            }
            syn::UseTree::Name(name) => self.declare(path, &name.ident.to_string(), &name.ident.to_string()),
            syn::UseTree::Rename(name) => {
                self.declare(path, &name.ident.to_string(), &name.rename.to_string())
            }
            syn::UseTree::Glob(_) => self.add(path),
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| self.uses(tree, path.clone())),
        }
    }

    fn declare(&mut self, mut path: Names, name: &str, declared: &str) {
        if name != "self" {
            path.push(name.to_owned());
        }
        if let Some(absolute) = absolute(&self.at, &path) {
            self.module().declared.insert(declared.to_owned(), absolute);
        }
        self.add(path);
    }

    fn add(&mut self, path: Names) {
        if let Some(absolute) = absolute(&self.at, &path) {
            self.module().paths.insert(absolute);
        }
    }
}

/// A path in the module `at` as it leads from the crate's root; `None` if it leads beyond that.
fn absolute(at: &[String], path: &[String]) -> Option<Names> {
    let (mut from, mut rest) = (at, path);
    match path.first()?.as_str() {
        "crate" => (from, rest) = (&[], &path[1..]),
        "self" => rest = &path[1..],
        "super" => {}
        // A module below, a name that a declaration leads elsewhere, or another crate.
        _ => {}
    }
    while rest.first().is_some_and(|step| step == "super") {
        (from, rest) = (&from[..from.len().checked_sub(1)?], &rest[1..]);
    }
    Some([from, rest].concat())
}

impl<'a> Visit<'a> for Reader<'_> {
    fn visit_item(&mut self, item: &'a syn::Item) {
        if let syn::Item::Mod(module) = item {
            if !for_tests(&module.attrs) {
                self.at.push(module.ident.to_string());
                self.module();
                syn::visit::visit_item_mod(self, module);
                self.at.pop();
            }
            return;
        }
        if let syn::Item::Use(declaration) = item {
            return self.uses(&declaration.tree, Names::new());
        }
        syn::visit::visit_item(self, item);
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        let steps: Names = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.add(steps);
        syn::visit::visit_path(self, path);
    }
}

/// Whether an item is compiled for tests alone, or lies with the tests.
fn for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::List(list) if list.path.is_ident("cfg") => {
            let condition = list.tokens.to_string();
            condition.contains("test") && !condition.contains("any")
        }
        meta => meta.path().is_ident("path"),
    })
}

impl Modules {
    /// Reads the module `at` from `file`, and the files of the modules below it from `folder`.
    fn read(&mut self, file: &Path, folder: &Path, at: Names) {
        let text =
            std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        Reader { modules: self, at: at.clone() }.visit_file(&parsed);
        for item in &parsed.items {
            let syn::Item::Mod(module) = item else { continue };
            if module.content.is_some() || for_tests(&module.attrs) {
                continue;
            }
            let name = module.ident.to_string();
            let (alone, inside) = (folder.join(format!("{name}.rs")), folder.join(&name));
            let file = if alone.exists() { alone } else { inside.join("mod.rs") };
            self.read(&file, &inside, [at.clone(), vec![name]].concat());
        }
    }

    /// The path to what `path` names, behind all that modules on its way declare.
    fn behind(&self, mut path: Names) -> Names {
        // Each declaration leads elsewhere; a limit, should they go in a circle.
        'follow: for _ in 0..16 {
            for len in 0..path.len() {
                let module = self.0.get(&path[..len]).filter(|_| !self.0.contains_key(&path[..=len]));
                if let Some(declared) = module.and_then(|module| module.declared.get(&path[len])) {
                    let further = [declared, &path[len + 1..]].concat();
                    if further == path {
                        break;
                    }
                    path = further;
                    continue 'follow;
                }
            }
            break;
        }
        path
    }

    /// Which modules use which of those beside them.
    fn edges(&self) -> BTreeMap<Names, BTreeSet<Names>> {
        let mut edges = BTreeMap::<_, BTreeSet<_>>::new();
        for (at, module) in &self.0 {
            for path in &module.paths {
                let path = self.behind(path.clone());
                let common = at.iter().zip(&path).take_while(|(one, other)| one == other).count();
                let (Some(from), Some(to)) = (at.get(..=common), path.get(..=common)) else { continue };
                if self.0.contains_key(to) {
                    edges.entry(from.to_vec()).or_default().insert(to.to_vec());
                }
            }
        }
        edges
    }
}

/// A circle of `edges`, if there is one: each uses the next, and the last one the first.
fn circle(edges: &BTreeMap<Names, BTreeSet<Names>>) -> Option<Vec<String>> {
    fn from<'a>(
        edges: &'a BTreeMap<Names, BTreeSet<Names>>,
        done: &mut BTreeSet<&'a Names>,
        way: &mut Vec<&'a Names>,
        module: &'a Names,
    ) -> Option<Vec<String>> {
        if let Some(first) = way.iter().position(|earlier| *earlier == module) {
            return Some(way[first..].iter().map(|module| module.join("::")).collect());
        }
        if !done.contains(module) {
            way.push(module);
            let found = edges.get(module).into_iter().flatten().find_map(|next| from(edges, done, way, next));
            if found.is_some() {
                return found;
            }
            way.pop();
            done.insert(module);
        }
        None
    }
    let mut done = BTreeSet::new();
    edges.keys().find_map(|module| from(edges, &mut done, &mut Vec::new(), module))
}

fn edges_of(source: &Path) -> BTreeMap<Names, BTreeSet<Names>> {
    let mut modules = Modules::default();
    modules.0.entry(Names::new()).or_default();
    modules.read(&source.join("lib.rs"), source, Names::new());
    modules.edges()
}

#[test]
fn the_core_s_modules_use_each_other_one_way() {
    let edges = edges_of(&crate::root().join("crates/portcullis/src"));
    assert!(edges.len() > 50, "{} modules use others", edges.len());
    assert_eq!(circle(&edges), None);
}

/// It finds circles: over three modules, through what a module above declares, and below a name that is declared twice.
#[test]
fn circles_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("lib.rs", "mod a; mod b; mod c; pub use c::Third as Last;");
    write("a.rs", "use super::b::Second; pub struct First(Second);");
    write("b.rs", "pub struct Second; impl Second { fn last() -> crate::Last { crate::Last } }");
    write("c.rs", "#[cfg(test)] mod tests { use crate::a::First; } pub struct Third;");
    assert_eq!(circle(&edges_of(folder.path())), None);
    write("c.rs", "pub struct Third; fn first(_: super::a::First) {}");
    let found = circle(&edges_of(folder.path())).unwrap();
    assert_eq!(found, ["a", "b", "c"]);
}
