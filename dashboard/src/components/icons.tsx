const PATHS = {
  overview: "M3 12.500 6.200 8l2.600 2.800L13 4.500M13 4.500H9.800M13 4.500v3.200M2.500 14h11",
  workers: "M2.500 2.500h4.500v4.500H2.500zM9 2.500h4.500v4.500H9zM2.500 9h4.500v4.500H2.500zM9 9h4.500v4.500H9z",
  data: "M8 2.200 14 5 8 7.800 2 5zM2 8l6 2.800L14 8M2 11l6 2.800L14 11",
  checkpoints: "M3 2.500h8l2.500 2.500v8.500H3zM5.500 2.500v4h5v-4M5.500 13.500V9.500h5v4",
  barriers: "M2 13.500V5M14 13.500V5M2 6.500h12M2 10h12M5.500 6.500 4 10M9 6.500 7.500 10M12.500 6.500 11 10",
  runs: "M8 14A6 6 0 1 0 8 2a6 6 0 0 0 0 12zM6.700 5.700v4.600L10.300 8z",
  journal: "M3 2.500h10v11H3zM5.500 5.500h5M5.500 8h5M5.500 10.500h3",
  settings: "M2 4.500h7M12 4.500h2M10.500 3v3M2 11.500h2M7 11.500h7M5.500 10v3",
  search: "M7 11.500a4.500 4.500 0 1 0 0-9 4.500 4.500 0 0 0 0 9zM10.300 10.300 13.500 13.500",
  chevron: "M4.500 6.500 8 10l3.500-3.500",
  back: "M9.500 4 5.500 8l4 4",
  sun: "M8 11a3 3 0 1 0 0-6 3 3 0 0 0 0 6zM8 1.500v1.500M8 13v1.500M1.500 8H3M13 8h1.500M3.400 3.400l1 1M11.600 11.600l1 1M3.400 12.600l1-1M11.600 4.400l1-1",
  moon: "M13.500 9.500A5.800 5.800 0 0 1 6.500 2.500a5.800 5.800 0 1 0 7 7z",
  help: "M8 14A6 6 0 1 0 8 2a6 6 0 0 0 0 12zM6.300 6.300a1.750 1.750 0 1 1 2.400 1.600c-.5.2-.7.5-.7 1v.3M8 11.400v.1",
  more: "M3.500 8h.01M8 8h.01M12.500 8h.01",
  check: "m3.500 8.500 3 3 6-7",
  alert: "M8 2.500 14.500 13.500h-13zM8 6.500v3.200M8 11.600v.1",
  pause: "M5.500 3.500v9M10.500 3.500v9",
  play: "M5 3.500v9L12 8z",
  download: "M8 2.500v7M5 7l3 3 3-3M3 13h10",
  table: "M2.500 3h11v10h-11zM2.500 6.300h11M2.500 9.600h11M6 6.300V13",
  save: "M8 2.500v6M5.500 6 8 8.500 10.500 6M3 9.500v4h10v-4",
  stop: "M8 14A6 6 0 1 0 8 2a6 6 0 0 0 0 12zM6 6h4v4H6z",
  leave: "M9.500 3H3v10h6.500M7 8h7M11.500 5.500 14 8l-2.500 2.500",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name, size = 16 }: { name: IconName; size?: number }) {
  return (
    <svg
      width={size}
      height={size}
      viewBox="0 0 16 16"
      fill="none"
      stroke="currentColor"
      strokeWidth={name === "more" ? 2.4 : 1.4}
      strokeLinecap="round"
      strokeLinejoin="round"
      aria-hidden="true"
    >
      <path d={PATHS[name]} />
    </svg>
  );
}

/** Three layers, one above the other. */
export function Logo({ size = 22 }: { size?: number }) {
  return (
    <svg
      width={size}
      height={size}
      viewBox="0 0 24 24"
      fill="none"
      stroke="currentColor"
      strokeWidth={2}
      strokeLinecap="round"
      strokeLinejoin="round"
      aria-hidden="true"
    >
      <path d="M12 3 22 7.800 12 12.600 2 7.800z" fill="currentColor" stroke="none" />
      <path d="m3 12.300 9 4.400 9-4.400" opacity={0.75} />
      <path d="m3 16.600 9 4.400 9-4.400" opacity={0.4} />
    </svg>
  );
}
