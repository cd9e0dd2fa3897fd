// What all pages do: folds, search, keys, and where the page is.
const all = (query, inside = document) => [...inside.querySelectorAll(query)];
const byId = (id) => document.getElementById(id);
document.documentElement.classList.add("js");

// --- Folding -----------------------------------------------------------------------------
const folds = (open) => all("main details").forEach((fold) => { fold.open = open; });
byId("open-all").addEventListener("click", () => folds(true));
byId("close-all").addEventListener("click", () => folds(false));
const reveal = (element) => {
  for (let at = element; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
};
const follow = () => {
  const target = location.hash.length > 1 && byId(decodeURIComponent(location.hash.slice(1)));
  if (target) { reveal(target); target.scrollIntoView(); }
};
addEventListener("hashchange", follow);
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href^='#']");
  if (link && link.getAttribute("href") === location.hash) follow();
});
let opened = [];
addEventListener("beforeprint", () => {  // kernels' texts are printed where they were open
  opened = all("main details:not([open])").filter((fold) => !fold.closest("#sources, .texts"));
  opened.forEach((fold) => { fold.open = true; });
});
addEventListener("afterprint", () => { opened.forEach((fold) => { fold.open = false; }); });

// --- Search ------------------------------------------------------------------------------
const search = byId("search");
const items = all(".item");
const texts = new Map();
const textOf = (item) => {
  if (!texts.has(item)) texts.set(item, `${item.id} ${item.textContent}`.toLowerCase());
  return texts.get(item);
};
const find = () => {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let hits = 0;
  for (const item of items) {
    const hit = words.every((word) => textOf(item).includes(word));
    item.classList.toggle("off", !hit);
    hits += hit;
  }
  byId("found").textContent = words.length ? `${hits} of ${items.length}` : "";
};
search.addEventListener("input", find);

// --- Keyboard ----------------------------------------------------------------------------
let current = -1;
const move = (by) => {
  const shown = items.filter((item) => !item.classList.contains("off"));
  if (!shown.length) return;
  const before = shown.indexOf(items[current]);
  const next = shown[Math.min(shown.length - 1, Math.max(0, before + by))];
  items.forEach((item) => item.classList.remove("at"));
  current = items.indexOf(next);
  next.classList.add("at");
  next.scrollIntoView({ block: "center" });
  const fold = next.querySelector(":scope > summary");
  if (fold) fold.focus({ preventScroll: true });
};
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && document.activeElement === search) {
    search.value = ""; find(); search.blur(); return;
  }
  if (event.key === "Enter" && document.activeElement === search) {
    search.blur(); current = -1; move(1); return;
  }
  if (event.target.matches("input, textarea")) return;
  const keys = {
    "/": () => search.focus(), j: () => move(1), k: () => move(-1),
    e: () => folds(true), c: () => folds(false),
  };
  if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
});

// --- Where the page is --------------------------------------------------------------------
const links = new Map(all(".side a").map((a) => [a.getAttribute("href").slice(1), a]));
const watch = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const link = links.get(entry.target.id);
    if (link && entry.isIntersecting) {
      links.forEach((other) => other.classList.remove("here"));
      link.classList.add("here");
    }
  }
}, { rootMargin: "-10% 0px -80% 0px" });
all("main section").forEach((section) => watch.observe(section));
